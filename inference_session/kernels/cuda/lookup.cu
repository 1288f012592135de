// The look-up of a request: any number of tables and segments in one launch. A warp takes one tile: some keys of one segment,
// each with a vector of its own in the output, or the one bag of a pooled vector.

// Rows that are unpublished while a look-up runs are not written to before it has ended (write.cu): so no row is ever read
// half. Each block reports when it begins, which empties its multiprocessor's first-level cache as well, and when it ends.
struct Reading {
  Readers* readers;
  u64 epoch = 0;  // 1: an odd one
  bool quiet = true;  // no row is written to before the block ends

  __device__ __forceinline__ explicit Reading(Readers* all) : readers(all) {
    if (all == nullptr) return;
    readers += blockIdx.x % READERS;
    if (threadIdx.x == 0) epoch = atomicAdd(&readers->arrivals, 1ull) >> EPOCH_BIT;
  }

  // Nothing that a writer changes may be read before this.
  __device__ __forceinline__ void wait() {
    if (readers == nullptr) return;
    if (threadIdx.x == 0) __threadfence();
    quiet = __syncthreads_or((int)epoch) == 0;
  }

  __device__ __forceinline__ void end() {
    if (readers == nullptr) return;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(&readers->departures[epoch], 1ull);
    }
  }
};

struct Source {
  const u8* row = nullptr;
  int code = FLOAT32;
  bool cached = false;
  bool known = false;
};

constexpr u8 MAX_MARK = 3;
constexpr int TILES_PER_MARKING_BITS = 4;  // of so many tiles, as a power of two, the hits of one leave marks

__device__ __forceinline__ bool is_marking(u32 tile, u32 seed) {
  return (tile * 2654435761u + seed * 2246822519u) >> (32 - TILES_PER_MARKING_BITS) == 0;
}

// A hot key's mark is found as it should be, and not written to again.
__device__ __forceinline__ void leave_mark(const Index& index, i64 slot) {
  u8* mark = index.marks + slot / SLOTS * BUCKET_BYTES + slot % SLOTS;
  if (*mark != MAX_MARK) *mark = MAX_MARK;
}

// The row below the cache; -1: none.
template <bool QUIET>
__device__ __forceinline__ i64 find_base_row(const Table& table, i64 key, u64 hashed, u64 policy) {
  if (table.base_by_number) {
    const i64 row = key < 0 ? key + table.num_base_rows : key;
    return (u64)row < (u64)table.num_base_rows ? row : -1;
  }
  if (table.base.num_buckets == 0) return -1;
  const i64 slot = find_slot<QUIET>(table.base, key, hashed, policy);
  return slot >= 0 ? (i64)__ldcg(table.base_numbers + slot) : -1;
}

template <bool QUIET>
__device__ __forceinline__ Source base_source(const Table& table, i64 key, u64 hashed, u64 policy) {
  Source source;
  const i64 row = find_base_row<QUIET>(table, key, hashed, policy);
  source.row = reinterpret_cast<const u8*>(table.default_vector);
  if (row >= 0) {
    const Rows& rows = table.base_rows;
    source = {rows.vectors + row * rows.row_bytes, (int)rows.code, false, true};
  }
  return source;
}

template <bool QUIET>
__device__ __forceinline__ Source find_source(const Table& table, i64 key, bool marking, u64 policy) {
  const u64 hashed = hash_key(key);
  const i64 slot = table.cached.num_buckets != 0 ? find_slot<QUIET>(table.cached, key, hashed, policy) : -1;
  if (slot < 0) return base_source<QUIET>(table, key, hashed, policy);
  if (marking) leave_mark(table.cached, slot);
  return {table.cached_rows.vectors + slot * table.cached_rows.row_bytes, (int)table.cached_rows.code, true, true};
}

__device__ __forceinline__ i64 load_key(const u8* address, i64 key_bytes) {
  return key_bytes == 8 ? *reinterpret_cast<const i64*>(address) : (i64) * reinterpret_cast<const int*>(address);
}

// Count and note what was not found; `asked` of the warp's lanes hold a key each.
__device__ __forceinline__ u32 note_missing(const Request& request, const Table& table, u32 s, bool asked,
                                            const Source& source) {
  const u32 uncached = __ballot_sync(ALL_LANES, asked && !source.cached);
  if (uncached == 0) return 0;
  const u32 unknown = __ballot_sync(ALL_LANES, asked && !source.known);
  if (threadIdx.x % LANES == 0) {
    if (table.events != nullptr) {
      atomicAdd(table.events + MISSES, (u64)__popc(uncached));
      if (unknown) atomicAdd(table.events + UNKNOWN, (u64)__popc(unknown));
    }
    if (unknown && request.num_unknown != nullptr) atomicAdd(request.num_unknown + s, (u64)__popc(unknown));
  }
  return unknown;
}

// Copy the rows of those lanes that hold one of this type.
template <int CODE, bool QUIET>
__device__ __forceinline__ void copy_if(const u8* row, int code, u8* output, int dim, int num_keys, bool wide) {
  const bool these = code == CODE && output != nullptr;
  if (!__any_sync(ALL_LANES, these)) return;
  if (!these) row = output = nullptr;
  if (wide) copy_rows<CODE, true, QUIET>(row, output, dim, num_keys);
  else copy_rows<CODE, false, QUIET>(row, output, dim, num_keys);
}

template <bool QUIET>
__device__ __forceinline__ void copy_all(const u8* row, int code, u8* output, int dim, int num_keys, bool wide) {
  copy_if<FLOAT32, QUIET>(row, code, output, dim, num_keys, wide);
  copy_if<FLOAT16, QUIET>(row, code, output, dim, num_keys, wide);
  copy_if<INT8, QUIET>(row, code, output, dim, num_keys, wide);
}

// The lanes in another order: those of `first`, then those of `second`, then the others. Returns the lane that takes this
// lane's place.
__device__ __forceinline__ int in_order(u32 first, u32 second) {
  __shared__ u8 lanes[32][LANES];
  u8* order = lanes[threadIdx.x / LANES];
  const u32 lane = threadIdx.x % LANES, before = (1u << lane) - 1, others = ~(first | second);
  const bool in_first = first >> lane & 1, in_second = second >> lane & 1;
  const u32 like_this = in_first ? first : in_second ? second : others;
  const u32 ahead = in_first ? 0 : in_second ? __popc(first) : __popc(first | second);
  __syncwarp();
  order[ahead + __popc(like_this & before)] = (u8)lane;
  __syncwarp();
  return order[lane];
}

// Copy rows of cached keys, then the others, closed up: these may come from host memory, where all of them are to be asked for
// at once, and no cached row waits behind one.
template <bool QUIET>
__device__ __forceinline__ void copy_sources(const Source& source, u8* output, int dim, bool wide) {
  const u32 cached = __ballot_sync(ALL_LANES, output != nullptr && source.cached);
  const u32 others = __ballot_sync(ALL_LANES, output != nullptr && !source.cached);
  if ((cached | others) == 0) return;
  const int from = in_order(cached, others), num_keys = __popc(cached | others);
  const u8* row = from_lane(source.row, from);
  u8* to = from_lane(output, from);
  copy_all<QUIET>(row, __shfl_sync(ALL_LANES, source.code, from), to, dim, num_keys, wide);
}

__device__ __forceinline__ bool is_wide(const Table& table, const Segment& segment) {
  const u64 output = reinterpret_cast<u64>(segment.output) | (u64)segment.output_stride;
  return table.cached_rows.wide && table.base_rows.wide && (output & 15) == 0;
}

// The key of a lane, read before the cache is looked at.
struct Asked {
  u32 count = 0;  // keys of the tile, one per lane from the first
  bool is_one = false;  // whether this lane has a key
  i64 key = 0;
  u8* output = nullptr;
};

__device__ __forceinline__ Asked keys_of(const Request& request, const Segment& segment, i64 dim, u32 tile, u32 first_tile) {
  const u32 lane = threadIdx.x % LANES, begin = (tile - first_tile) * request.keys_per_tile;
  Asked asked;
  asked.count = min(request.keys_per_tile, (u32)(segment.num_rows * segment.keys_per_row) - begin);
  asked.is_one = lane < asked.count;
  if (!asked.is_one) return asked;
  u32 row = begin + lane, column = 0;
  if (segment.keys_per_row != 1) {
    column = row % (u32)segment.keys_per_row;
    row /= (u32)segment.keys_per_row;
  }
  asked.key = load_key(segment.keys + row * segment.row_stride + column * segment.key_stride, segment.key_bytes);
  asked.output = segment.output + request.outputs + row * segment.output_stride + (i64)column * dim * 4;
  return asked;
}

template <bool QUIET>
__device__ __forceinline__ void look_up_keys(const Request& request, const Segment& segment, const Table& table, u32 s,
                                             u32 tile, const Asked& asked, bool marking, u64 policy) {
  Source source;
  if (asked.is_one) source = find_source<QUIET>(table, asked.key, marking, policy);
  const u32 unknown = note_missing(request, table, s, asked.is_one, source);
  if (request.missing_bits != nullptr && threadIdx.x % LANES == 0) request.missing_bits[tile] = unknown;
  const bool to_copy = asked.is_one && (source.row != nullptr || request.fill);
  copy_sources<QUIET>(source, to_copy ? asked.output : nullptr, (int)table.dim, is_wide(table, segment));
}

template <bool WIDE, bool QUIET>
__device__ __forceinline__ Elements<WIDE> load_any(const u8* row, int code, int step, int dim) {
  if (row == nullptr) return Elements<WIDE>::all(0.0f);
  if (code == FLOAT32) return Elements<WIDE>::template load<FLOAT32, QUIET>(row, step, dim);
  if (code == FLOAT16) return Elements<WIDE>::template load<FLOAT16, QUIET>(row, step, dim);
  return Elements<WIDE>::template load<INT8, QUIET>(row, step, dim);
}

__device__ __forceinline__ float larger(float a, float b) { return b > a || b != b ? b : a; }  // a NaN wins

struct Bag {
  const u8* keys;  // of the first
  const float* weights;  // null: all ones
  i64 length;
};

__device__ __forceinline__ Bag bag_of(const Segment& segment, u32 row) {
  const i64 begin = segment.begins != nullptr ? segment.begins[row] : 0;
  const i64 length = segment.begins != nullptr ? segment.ends[row] - begin : segment.keys_per_row;
  const u8* keys = segment.keys + (segment.begins != nullptr ? begin * segment.key_stride : row * segment.row_stride);
  const i64 first = segment.begins != nullptr ? begin : row * segment.keys_per_row;
  return {keys, segment.weights != nullptr ? segment.weights + first : nullptr, length};
}

template <bool WIDE, bool QUIET>
__device__ __forceinline__ void pool_bag(const Request& request, const Segment& segment, const Table& table, u32 s, u32 row,
                                         bool marking, u64 policy) {
  const int lane = threadIdx.x % LANES, dim = (int)table.dim;
  const int steps = dim / Elements<WIDE>::COUNT, width = lanes_per_row(steps), rows_at_once = LANES / width;
  const int member = lane & (width - 1), group = lane / width;
  const bool takes_largest = segment.pooling == MAX;
  const Bag bag = bag_of(segment, row);
  for (int first_step = 0; first_step < steps; first_step += width) {
    const int step = min(first_step + member, steps - 1);
    Elements<WIDE> pooled = Elements<WIDE>::all(takes_largest && bag.length > 0 ? -__int_as_float(0x7f800000) : 0.0f);
    for (i64 first = 0; first < bag.length; first += LANES) {
      const bool asked = first + lane < bag.length;
      const int count = (int)min((i64)LANES, bag.length - first);
      Source source;
      i64 key = 0;
      float weight = 1.0f;
      if (asked) {
        key = load_key(bag.keys + (first + lane) * segment.key_stride, segment.key_bytes);
        source = find_source<QUIET>(table, key, marking, policy);
        if (bag.weights != nullptr) weight = bag.weights[first + lane];
      }
      if (first_step == 0) note_missing(request, table, s, asked, source);
#pragma unroll 4
      for (int i = 0; i < count; i += rows_at_once) {
        const int place = (i + group) & (LANES - 1);
        const u8* from = from_lane(source.row, place);
        const int code = __shfl_sync(ALL_LANES, source.code, place);
        const float factor = __shfl_sync(ALL_LANES, weight, place);
        if (i + group < count) {
          const Elements<WIDE> elements = load_any<WIDE, QUIET>(from, code, step, dim);
          if (takes_largest) pooled = pooled.with(elements, [=](float a, float b) { return larger(a, b * factor); });
          else pooled = pooled.with(elements, [=](float a, float b) { return __fadd_rn(a, __fmul_rn(b, factor)); });
        }
      }
    }
    for (int distance = width; distance < LANES; distance *= 2) {
      const Elements<WIDE> other = pooled.from_lane(distance);
      if (takes_largest) pooled = pooled.with(other, [](float a, float b) { return larger(a, b); });
      else pooled = pooled.with(other, [](float a, float b) { return a + b; });
    }
    if (segment.pooling == MEAN && bag.length > 0) {
      const float length = (float)bag.length;
      pooled = pooled.with(pooled, [=](float a, float) { return __fdiv_rn(a, length); });
    }
    if (group == 0 && first_step + member < steps) pooled.store(segment.output + request.outputs + row * segment.output_stride, step);
  }
}

// The segment that a tile belongs to: the last that begins at or before it.
__device__ __forceinline__ u32 segment_of(const u32* first_tiles, u32 num_segments, u32 tile) {
  u32 low = 0, high = num_segments - 1;
  while (low < high) {
    const u32 middle = (low + high + 1) / 2;
    if (first_tiles[middle] <= tile) low = middle;
    else high = middle - 1;
  }
  return low;
}

__device__ __forceinline__ u32 this_tile() { return blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES; }

// For few segments, none of them pooled: these stay in the parameters' own memory.
extern "C" __global__ void __launch_bounds__(256) look_up(const __grid_constant__ Request request) {
  Reading reading(request.readers);
  const u32 tile = this_tile();
  const bool exists = tile < request.num_tiles;
  const u32 s = exists ? segment_of(request.few_tiles, request.num_segments, tile) : 0;
  const Segment& segment = request.few_segments[s];
  const Table& table = request.tables[segment.table];
  Asked asked;
  if (exists) asked = keys_of(request, segment, table.dim, tile, request.few_tiles[s]);
  reading.wait();
  if (exists) {
    const bool marking = is_marking(tile, request.seed);
    if (reading.quiet) look_up_keys<true>(request, segment, table, s, tile, asked, marking, keeping_policy());
    else look_up_keys<false>(request, segment, table, s, tile, asked, marking, keeping_policy());
  }
  reading.end();
}

template <bool QUIET>
__device__ __forceinline__ void look_up_tile(const Request& request, u32 tile) {
  const u64 policy = keeping_policy();
  const u32* first_tiles = request.first_tiles != nullptr ? request.first_tiles : request.few_tiles;
  const u32 s = segment_of(first_tiles, request.num_segments, tile);
  const Segment& segment = request.segments != nullptr ? request.segments[s] : request.few_segments[s];
  const Table& table = request.tables[segment.table];
  const u32 bag = tile - first_tiles[s];
  const bool marking = is_marking(tile, request.seed);
  if (segment.pooling == NONE) {
    const Asked asked = keys_of(request, segment, table.dim, tile, first_tiles[s]);
    look_up_keys<QUIET>(request, segment, table, s, tile, asked, marking, policy);
  } else if (is_wide(table, segment)) {
    pool_bag<true, QUIET>(request, segment, table, s, bag, marking, policy);
  } else {
    pool_bag<false, QUIET>(request, segment, table, s, bag, marking, policy);
  }
}

// For any segments.
extern "C" __global__ void __launch_bounds__(256) look_up_and_pool(const __grid_constant__ Request request) {
  Reading reading(request.readers);
  reading.wait();
  const u32 tile = this_tile();
  if (tile < request.num_tiles) {
    if (reading.quiet) look_up_tile<true>(request, tile);
    else look_up_tile<false>(request, tile);
  }
  reading.end();
}
