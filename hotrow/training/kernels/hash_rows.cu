// The rows of a hash embedding on a GPU: from keys to rows while rows are added, sums of gradients, and optimizers.
// Compiled behind layout.cuh and index.cuh of the product's cache, whose types and hash function it uses.
//
// The index is an array of `mask + 1` entries, a power of two, at most half of them in use. An entry is 0 where it is free;
// else its upper half is a tag of the key, its lower half the key's row. A key stands at its hash or behind it, before the next
// free entry. While `claim` runs, an entry of a new key names the key's place in the batch instead (PENDING);
// `write_claimed` then writes the row. Rows are compared by their keys, so that keys with the same tag are distinguished.

constexpr u64 PENDING = 1ull << 31, NUMBER = PENDING - 1, TAG = 0xffffffff00000000ull;

__device__ __forceinline__ i64 thread_number() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }

extern "C" __global__ void find_rows(const u64* entries, u64 mask, const i64* table_keys, const i64* keys, i64 n, i64* rows) {
  const i64 i = thread_number();
  if (i >= n) return;
  const i64 key = keys[i];
  const u64 hashed = hash_key(key);
  i64 row = 0;
  for (u64 place = hashed & mask;; place = (place + 1) & mask) {
    const u64 entry = __ldg(entries + place);
    if (entry == 0) break;
    if ((entry & TAG) == (hashed & TAG) && __ldg(table_keys + (entry & NUMBER)) == key) {
      row = (i64)(entry & NUMBER);
      break;
    }
  }
  rows[i] = row;
}

// The owner of a key among several: key % num_owners, from 0 on, also of negative keys.
__device__ __forceinline__ i64 owner_of(i64 key, i64 num_owners) {
  if (num_owners == 1) return 0;
  const i64 rest = key % num_owners;
  return rest < 0 ? rest + num_owners : rest;
}

// Keys that a rank requests from another may come in a message: how many there are, the most of any message of the same sender,
// and the keys; the slots behind them mean nothing. If there are more keys than slots, the message holds some of them.
constexpr i64 HEADER = 2;

// Whether keys[i] is a key. Without messages, of size 0, all are.
__device__ __forceinline__ bool is_key(const i64* keys, i64 i, i64 message_size) {
  if (message_size == 0) return true;
  const i64 slot = i % message_size;
  return slot >= HEADER && slot - HEADER < __ldg(keys + (i - slot));
}

// Finds the entry of each key, or claims one; rows[i] is the new row of a key that claimed one, which counts[owner] counts. Keys
// may come more than once. Of messages, `most` gets the most keys that any rank requests from any other.
extern "C" __global__ void claim(u64* entries, u64 mask, const i64* table_keys, const i64* keys, i64 n, i64 message_size,
                                 i64* most, u64* counts, i64 num_owners, u32* places, i64* rows) {
  const i64 i = thread_number();
  if (message_size != 0 && i == 0) {
    i64 found = 0;
    for (i64 begin = 0; begin < n; begin += message_size) found = max(found, __ldg(keys + begin + 1));
    *most = found;
  }
  bool is_new = false;
  i64 owner = 0;
  if (i < n && is_key(keys, i, message_size)) {
    const i64 key = keys[i];
    const u64 hashed = hash_key(key);
    const u64 wanted = (hashed & TAG) | PENDING | (u64)i;
    u64 place = hashed & mask;
    for (;; place = (place + 1) & mask) {
      u64 entry = __ldcg(entries + place);
      if (entry == 0) {
        entry = atomicCAS(entries + place, 0, wanted);
        is_new = entry == 0;
        if (is_new) break;
      }
      if ((entry & TAG) != (hashed & TAG)) continue;
      const u64 number = entry & NUMBER;
      if (__ldg((entry & PENDING ? keys : table_keys) + number) == key) break;
    }
    places[i] = (u32)place;
    owner = owner_of(key, num_owners);
  }
  const u32 claiming = __ballot_sync(ALL_LANES, is_new);
  if (!is_new) return;
  const u32 same = __match_any_sync(claiming, (u32)owner);
  const u32 lane = threadIdx.x % LANES, leader = __ffs(same) - 1;
  u64 first = 0;
  if (lane == leader) first = atomicAdd(counts + owner, (u64)__popc(same));
  first = __shfl_sync(same, first, leader);
  rows[i] = (i64)first + __popc(same & ((1u << lane) - 1));
}

// Writes the row of a key to rows[i], from its entry or from the thread that claimed this; what is no key of a message gets row 0.
// The thread that claimed the entry writes row and key there, and returns the row; others return 0.
__device__ __forceinline__ i64 write_one_claimed(u64* entries, i64* table_keys, const i64* keys, i64 i, i64 message_size,
                                                 const u32* places, const i64* claimed, i64* rows) {
  if (!is_key(keys, i, message_size)) {
    rows[i] = 0;
    return 0;
  }
  const u64 entry = __ldcg(entries + places[i]);
  const u64 number = entry & NUMBER;
  if (!(entry & PENDING)) {
    rows[i] = (i64)number;
    return 0;
  }
  const i64 row = __ldcg(claimed + number);
  rows[i] = row;
  if (number != (u64)i) return 0;
  table_keys[row] = keys[i];
  entries[places[i]] = (entry & TAG) | (u64)row;
  return row;
}

// The first vector of a new row: each element is that of the same column in a row of `initial`, [INITIAL_ROWS, dim], as
// HashRows.initial_vectors says. The lanes of a warp write one together.
constexpr u64 INITIAL_ROWS = 4096;

__device__ __forceinline__ void begin_row(const float* initial, i64 key, float* vector, u64 dim) {
  u64 mixed = (u64)key ^ 0x1E3779B97F4A7C15ull;
  mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9ull;
  mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBull;
  mixed = (mixed ^ mixed >> 31) & 0x3FFFFFFFFFFFFFFFull;
  for (u64 d = threadIdx.x % LANES; d < dim; d += LANES) {
    const u64 place = (mixed + ((mixed >> 12) + (mixed >> 24) * d) * d) % INITIAL_ROWS;
    vector[d] = __ldg(initial + place * dim + d);
  }
}

// Writes what was claimed. New rows also get their first vectors, unless there are no `vectors`.
extern "C" __global__ void write_claimed(u64* entries, i64* table_keys, const i64* keys, i64 n, i64 message_size, const u32* places,
                                         const i64* claimed, i64* rows, const float* initial, float* vectors, i64 dim) {
  const i64 i = thread_number();
  const i64 row = i < n ? write_one_claimed(entries, table_keys, keys, i, message_size, places, claimed, rows) : 0;
  if (vectors == nullptr) return;
  const i64 key = row != 0 ? keys[i] : 0;
  for (u32 left = __ballot_sync(ALL_LANES, row != 0); left != 0; left &= left - 1) {
    const int lane = __ffs(left) - 1;
    const i64 new_key = __shfl_sync(ALL_LANES, key, lane), new_row = __shfl_sync(ALL_LANES, row, lane);
    begin_row(initial, new_key, vectors + new_row * dim, (u64)dim);
  }
}

// As `write_claimed`, for rows that were counted for each owner on its own, and for an index that is not used again. The
// distinct keys follow each other, ordered by owners; with messages, they go to these, one for each owner: where `outputs` says, the address of
// the messages that an owner gets from all ranks; else to `found`, by owners.
extern "C" __global__ void number_by_owner(const u64* entries, i64* found, const u64* outputs, i64 rank, i64 message_size,
                                           const i64* keys, i64 n, const u32* places, const i64* claimed, const i64* counts,
                                           i64 num_owners, i64* numbers) {
  const i64 i = thread_number();
  const auto message_to = [&](i64 owner) {
    return outputs == nullptr ? found + owner * message_size : (i64*)__ldg(outputs + owner) + rank * message_size;
  };
  if (message_size != 0 && i < num_owners) {
    i64 most = 0;
    for (i64 owner = 0; owner < num_owners; ++owner) most = max(most, __ldg(counts + owner));
    message_to(i)[0] = __ldg(counts + i);
    message_to(i)[1] = most;
  }
  if (i >= n) return;
  const u64 claimer = __ldg(entries + places[i]) & NUMBER;
  const i64 owner = owner_of(keys[i], num_owners), of_owner = __ldg(claimed + claimer);
  if (message_size != 0) {
    const i64 slot = of_owner + HEADER;
    numbers[i] = owner * message_size + slot;
    if (claimer == (u64)i && slot < message_size) message_to(owner)[slot] = keys[i];
    return;
  }
  i64 number = of_owner;
  for (i64 before = 0; before < owner; ++before) number += __ldg(counts + before);
  numbers[i] = number;
  if (claimer == (u64)i) found[number] = keys[i];
}

// Puts rows from 1 to num_rows - 1 into an index that has none of them.
extern "C" __global__ void index_rows(u64* entries, u64 mask, const i64* table_keys, i64 num_rows) {
  const i64 row = thread_number() + 1;
  if (row >= num_rows) return;
  const u64 hashed = hash_key(table_keys[row]);
  const u64 wanted = (hashed & TAG) | (u64)row;
  for (u64 place = hashed & mask; atomicCAS(entries + place, 0, wanted) != 0; place = (place + 1) & mask) {
  }
}

__device__ __forceinline__ void add_four(float* address, const float4& added) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(added.x), "f"(added.y),
               "f"(added.z), "f"(added.w)
               : "memory");
#else
  atomicAdd(address, added.x);
  atomicAdd(address + 1, added.y);
  atomicAdd(address + 2, added.z);
  atomicAdd(address + 3, added.w);
#endif
}

// A block is of threadIdx.y rows, and of threadIdx.x threads that share the elements of each.
__device__ __forceinline__ i64 row_number() { return (i64)blockIdx.x * blockDim.y + threadIdx.y; }

constexpr u32 TILE = 256, NO_KEY = 0xffffffff;  // keys that a block adds up, as many as it has threads

// Adds a vector to the row of `sums` that each key names: sources[i] of `vectors`, or number i / width. A block adds up the vectors of the
// same row before it adds them to the sum: with skewed keys, a few sums would get most of the additions, one after the other.
extern "C" __global__ void add_up(float* sums, i64 dim, const i64* rows, i64 n, const float* vectors,
                                  const i64* sources, i64 width, const float* factors) {
  __shared__ u32 row_of[TILE], next_of[TILE], leaders[TILE], num_leaders;
  const u32 thread = threadIdx.y * blockDim.x + threadIdx.x;
  const i64 begin = (i64)blockIdx.x * TILE, i = begin + thread;
  const u32 row = i < n ? (u32)rows[i] : NO_KEY;
  row_of[thread] = row;
  if (thread == 0) num_leaders = 0;
  __syncthreads();
  if (row != NO_KEY) {
    bool leads = true;
    u32 next = NO_KEY;
    for (u32 other = TILE; other-- > 0;) {
      if (row_of[other] != row) continue;
      if (other > thread) next = other;
      leads &= other >= thread;
    }
    next_of[thread] = next;
    if (leads) leaders[atomicAdd(&num_leaders, 1u)] = thread;
  }
  __syncthreads();
  for (u32 k = threadIdx.y; k < num_leaders; k += blockDim.y) {
    float* sum = sums + (i64)row_of[leaders[k]] * dim;
    const i64 step = dim % 4 == 0 ? 4 : 1;
    for (i64 d = step * threadIdx.x; d < dim; d += step * blockDim.x) {
      float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
      for (u32 key = leaders[k]; key != NO_KEY; key = next_of[key]) {
        const float* vector = vectors + (sources == nullptr ? (begin + key) / width : sources[begin + key]) * dim + d;
        const float factor = factors == nullptr ? 1.0f : factors[begin + key];
        const float4 value = step == 4 ? __ldg((const float4*)vector) : float4{*vector, 0.0f, 0.0f, 0.0f};
        total = {total.x + factor * value.x, total.y + factor * value.y, total.z + factor * value.z,
                 total.w + factor * value.w};
      }
      if (step == 4) add_four(sum + d, total);
      else atomicAdd(sum + d, total.x);
    }
  }
}

// Some elements of a vector that a thread reads at once.
template <int N>
struct alignas(4 * N) Elements {
  float values[N];
};

constexpr int AT_ONCE = 4;  // vectors of which a thread has elements under way

template <int N>
__device__ void gather(const float* table, i64 dim, const i64* rows, i64 n, float* output) {
  const i64 begin = (i64)blockIdx.x * blockDim.y * AT_ONCE + threadIdx.y;
  for (i64 d = N * threadIdx.x; d < dim; d += N * blockDim.x) {
    Elements<N> vectors[AT_ONCE];
    for (int k = 0; k < AT_ONCE; ++k) {
      const i64 i = begin + k * blockDim.y;
      if (i < n) vectors[k] = *(const Elements<N>*)(table + rows[i] * dim + d);
    }
    for (int k = 0; k < AT_ONCE; ++k) {
      const i64 i = begin + k * blockDim.y;
      if (i < n) *(Elements<N>*)(output + i * dim + d) = vectors[k];
    }
  }
}

extern "C" __global__ void gather_rows(const float* table, i64 dim, const i64* rows, i64 n, float* output) {
  if (dim % 4 == 0 && ((u64)table | (u64)output) % sizeof(float4) == 0) {
    gather<4>(table, dim, rows, n, output);
  } else {
    gather<1>(table, dim, rows, n, output);
  }
}

// What goes between a row of a table here and the vector of its key in the memory of the rank that asked for it.
enum class Way { SEND, FETCH, LEARN };

// For each key in messages, which follow each other in the order of the ranks that sent them: place is its slot among all of them,
// rows[place] its row, and peers[other] + (rank * message_size + its slot in the message) its vector on the rank that sent it.
// SEND: table[row] goes there, and zeros[place] becomes zeros, also where is no key. FETCH: to table[place] goes what is there. LEARN: table[row] gets rate times what is there added.
// Neighbouring rows are of different ranks, so that all links are busy.
template <Way WAY, int N>
__device__ void exchange(float* table, i64 dim, const i64* rows, const i64* messages, i64 message_size, i64 num_ranks, i64 rank,
                         const u64* peers, float rate, float* zeros) {
  const i64 begin = (i64)blockIdx.x * blockDim.y * AT_ONCE + threadIdx.y;
  for (i64 d = N * threadIdx.x; d < dim; d += N * blockDim.x) {
    Elements<N> vectors[AT_ONCE];
    float* targets[AT_ONCE];
    for (int k = 0; k < AT_ONCE; ++k) {
      const i64 i = begin + k * blockDim.y, other = (i + rank) % num_ranks, slot = i / num_ranks;
      const i64 place = other * message_size + slot;
      targets[k] = nullptr;
      if (slot >= message_size) continue;
      if (WAY == Way::SEND && zeros != nullptr) *(Elements<N>*)(zeros + place * dim + d) = {};
      if (!is_key(messages, place, message_size)) continue;
      float* there = (float*)__ldg(peers + other) + (rank * message_size + slot) * dim + d;
      float* here = table + (WAY == Way::FETCH ? place : __ldg(rows + place)) * dim + d;
      if (WAY == Way::LEARN && here == table + d) continue;  // row 0
      targets[k] = WAY == Way::SEND ? there : here;
      vectors[k] = *(const Elements<N>*)(WAY == Way::SEND ? here : there);
    }
    for (int k = 0; k < AT_ONCE; ++k) {
      if (targets[k] == nullptr) continue;
      if (WAY != Way::LEARN) {
        *(Elements<N>*)targets[k] = vectors[k];
      } else if (N == 4) {
        const float* value = vectors[k].values;
        add_four(targets[k], {rate * value[0], rate * value[1 % N], rate * value[2 % N], rate * value[3 % N]});
      } else {
        atomicAdd(targets[k], rate * vectors[k].values[0]);
      }
    }
  }
}

#define EXCHANGE(name, way)                                                                                                    \
  extern "C" __global__ void name(float* table, i64 dim, const i64* rows, const i64* messages, i64 message_size,               \
                                  i64 num_ranks, i64 rank, const u64* peers, float rate, float* zeros) {                       \
    if (dim % 4 == 0) exchange<way, 4>(table, dim, rows, messages, message_size, num_ranks, rank, peers, rate, zeros);         \
    else exchange<way, 1>(table, dim, rows, messages, message_size, num_ranks, rank, peers, rate, zeros);                      \
  }

EXCHANGE(send_rows, Way::SEND)
EXCHANGE(fetch_rows, Way::FETCH)
EXCHANGE(learn_rows, Way::LEARN)

// Sums of the vectors of bags, [num_bags, dim], each vector times its factor; divided by the sum of the factors for means.
// places[i] is the number of a key of a bag among the distinct keys; rows[number] is its row in `table`, or the number itself.
template <int N>
__device__ void pool_bag(float* sums, i64 dim, const i64* begins, i64 width, i64 num_bags, const i64* places,
                         const float* factors, const float* table, const i64* rows, bool is_mean) {
  const i64 bag = row_number();
  if (bag >= num_bags) return;
  const i64 begin = begins == nullptr ? bag * width : begins[bag];
  const i64 end = begins == nullptr ? begin + width : begins[bag + 1];
  for (i64 d = N * threadIdx.x; d < dim; d += N * blockDim.x) {
    Elements<N> total = {};
    float all_scales = 0.0f;
    for (i64 i = begin; i < end; i += AT_ONCE) {
      Elements<N> vectors[AT_ONCE] = {};  // all of them are under way before the first is added
      float scales[AT_ONCE] = {};
      for (int k = 0; k < AT_ONCE; ++k) {
        if (i + k >= end) continue;
        const i64 place = places[i + k];
        scales[k] = factors == nullptr ? 1.0f : factors[i + k];
        vectors[k] = *(const Elements<N>*)(table + (rows == nullptr ? place : __ldg(rows + place)) * dim + d);
      }
      for (int k = 0; k < AT_ONCE; ++k) {
        all_scales += scales[k];
        for (int e = 0; e < N; ++e) total.values[e] += scales[k] * vectors[k].values[e];
      }
    }
    if (is_mean && all_scales != 0.0f) {
      for (int e = 0; e < N; ++e) total.values[e] /= all_scales;
    }
    *(Elements<N>*)(sums + bag * dim + d) = total;
  }
}

// Bags begin at `begins`, or have `width` keys each.
extern "C" __global__ void pool(float* sums, i64 dim, const i64* begins, i64 width, i64 num_bags, const i64* places,
                                const float* factors, const float* table, const i64* rows, i64 is_mean) {
  if (dim % 4 == 0) {
    pool_bag<4>(sums, dim, begins, width, num_bags, places, factors, table, rows, is_mean);
  } else {
    pool_bag<1>(sums, dim, begins, width, num_bags, places, factors, table, rows, is_mean);
  }
}

// Notes for each row one place where `rows` names it.
extern "C" __global__ void note_places(const i64* rows, i64 n, u32* place_of_row) {
  const i64 i = thread_number();
  if (i < n) place_of_row[rows[i]] = (u32)i;
}

// Adds the gradients of a row that is named more than once to those at its noted place. `once` names each row there only, and
// row 0 elsewhere.
extern "C" __global__ void join(const i64* rows, i64 n, const u32* place_of_row, float* gradients, i64 dim, i64* once) {
  const i64 i = row_number();
  if (i >= n) return;
  const i64 row = rows[i], place = place_of_row[row];
  if (threadIdx.x == 0) once[i] = place == i ? row : 0;
  if (place == i || row == 0) return;
  float* sum = gradients + place * dim;
  const float* added = gradients + i * dim;
  if (dim % 4 != 0 || (u64)gradients % sizeof(float4) != 0) {
    for (i64 d = threadIdx.x; d < dim; d += blockDim.x) atomicAdd(sum + d, added[d]);
    return;
  }
  for (i64 d = 4 * threadIdx.x; d < dim; d += 4 * blockDim.x) add_four(sum + d, *(const float4*)(added + d));
}

// Optimizers, element by element; hash_embeddings/optimizers.py has their formulas. Row 0 belongs to no key.

struct Settings {
  float rate, first, second, fresh, eps;  // of Adam: 1 - beta1, beta2, 1 - beta2, which float32 cannot subtract exactly
};

struct Adagrad {
  static __device__ float learn(float value, float gradient, float* sum, float*, const Settings& settings) {
    const float total = *sum + gradient * gradient;
    *sum = total;
    return value - settings.rate * (gradient / (sqrtf(total) + settings.eps));
  }
};

struct Adam {
  static __device__ float learn(float value, float gradient, float* averages, float* squares, const Settings& settings) {
    const float average = *averages + settings.first * (gradient - *averages);
    const float square = settings.second * *squares + settings.fresh * gradient * gradient;
    *averages = average;
    *squares = square;
    return value - settings.rate * (average / (sqrtf(square) + settings.eps));
  }
};

template <class Optimizer>
__device__ void learn(float* vectors, float* first, float* second, i64 dim, const i64* rows, i64 n, const float* gradients,
                      const Settings& settings) {
  const i64 i = row_number();
  if (i >= n || rows[i] == 0) return;
  for (i64 d = threadIdx.x; d < dim; d += blockDim.x) {
    const i64 place = rows[i] * dim + d;
    vectors[place] = Optimizer::learn(vectors[place], gradients[i * dim + d], first + place, second + place, settings);
  }
}

#define OPTIMIZER(name, kind)                                                                                                  \
  extern "C" __global__ void name(float* vectors, float* first, float* second, i64 dim, const i64* rows, i64 n,                \
                                  const float* gradients, float rate, float first_factor, float second_factor, float fresh,   \
                                  float eps) {                                                                                 \
    learn<kind>(vectors, first, second, dim, rows, n, gradients, {rate, first_factor, second_factor, fresh, eps});             \
  }

OPTIMIZER(learn_adagrad, Adagrad)
OPTIMIZER(learn_adam, Adam)

// A row may be named more than once: what it learns from its gradients is what it learns from their sum.
extern "C" __global__ void learn_sgd(float* vectors, float*, float*, i64 dim, const i64* rows, i64 n, const float* gradients,
                                     float rate, float, float, float, float) {
  const i64 i = row_number();
  if (i >= n || rows[i] == 0) return;
  float* vector = vectors + rows[i] * dim;
  const float* gradient = gradients + i * dim;
  if (dim % 4 != 0 || ((u64)vectors | (u64)gradients) % sizeof(float4) != 0) {
    for (i64 d = threadIdx.x; d < dim; d += blockDim.x) atomicAdd(vector + d, -rate * gradient[d]);
    return;
  }
  for (i64 d = 4 * threadIdx.x; d < dim; d += 4 * blockDim.x) {
    const float4 value = __ldg((const float4*)(gradient + d));
    add_four(vector + d, {-rate * value.x, -rate * value.y, -rate * value.z, -rate * value.w});
  }
}
