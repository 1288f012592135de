// The look-up of a request: any number of tables and segments in one launch. A warp takes one tile: some keys of one segment,
// each with a vector of its own in the output, or some bags of a pooled one. Nothing is written to tables meanwhile.

struct Source {
  const u8* row = nullptr;
  int code = FLOAT32;
  bool cached = false;
  bool known = false;
};

constexpr u8 MAX_MARK = 3;
constexpr u8 DELETED_MARK = 0;  // where ROWS_CHANGE
constexpr int TILES_PER_MARKING_BITS = 4;  // of 2^this tiles, the hits of one leave marks

__device__ __forceinline__ bool is_marking(u32 tile, u32 seed) {
  return (tile * 2654435761u + seed * 2246822519u) >> (32 - TILES_PER_MARKING_BITS) == 0;
}

constexpr int SAMPLING_BITS = 6;  // of 2^this warps, one notes what it reads of a sharded table

// By the clock, not by a seed: a look-up that is repeated has one seed.
__device__ __forceinline__ bool is_sampling() { return (u32)clock() * 2654435761u >> (32 - SAMPLING_BITS) == 0; }

__device__ __forceinline__ bool takes_samples(const Table& table) {
  return table.samples != nullptr && *(volatile u64*)&table.samples->num_keys < table.max_sampled;
}

__device__ __forceinline__ void sample_remote(const Table& table, i64 key) {
  if (!is_sampling() || !takes_samples(table)) return;
  const u64 place = atomicAdd(&table.samples->num_keys, 1ull);
  if (place < table.max_sampled) table.samples->keys[place] = key;
}

// A hot key's mark is found as it should be, and not written to again.
__device__ __forceinline__ void leave_mark(const Index& index, i64 slot) {
  u8* mark = index.marks + slot / SLOTS * BUCKET_BYTES + slot % SLOTS;
  if (*mark != MAX_MARK) *mark = MAX_MARK;
}

__device__ __forceinline__ void sample_copy(const Table& table, i64 slot) {
  leave_mark(table.cached, slot);
  if (takes_samples(table)) atomicAdd(&table.samples->copies_read, 1ull);
}

// The one key that a row is kept under: row numbers that count from the end become those that count from the start.
__device__ __forceinline__ i64 stored_key(const Table& table, i64 key) {
  return key < 0 && key >= -table.num_row_numbers ? key + table.num_row_numbers : key;
}

// The row below the cache; -1: none. The key is one that `stored_key` gave.
__device__ __forceinline__ i64 find_base_row(const Table& table, i64 key, u64 policy) {
  if (table.num_row_numbers != 0) return (u64)key < (u64)table.num_base_rows ? key : -1;
  if (table.base.num_buckets == 0) return -1;
  const i64 slot = find_slot<true>(table.base, key, place_of(table.base, key), policy);
  return slot >= 0 ? (i64)__ldcg(table.base_numbers + slot) : -1;
}

// Row r of a sharded table is row r / NUM_SHARDS of shard r % NUM_SHARDS, which may be another GPU's memory.
__device__ __forceinline__ const u8* base_row(const Table& table, i64 key, i64 row) {
  const u8* vectors = table.base_rows.vectors;
  if constexpr (NUM_SHARDS > 1) {
    if (table.shards[0] != nullptr) {
      vectors = table.shards[(u64)row % NUM_SHARDS];
      row = (u64)row / NUM_SHARDS;
      if (vectors != table.base_rows.vectors) sample_remote(table, key);
    }
  }
  return vectors + row * table.base_rows.row_bytes;
}

__device__ __forceinline__ Source base_source(const Table& table, i64 key, u64 policy) {
  Source source;
  const i64 row = find_base_row(table, key, policy);
  source.row = reinterpret_cast<const u8*>(table.default_vector);
  if (row >= 0) source = {base_row(table, key, row), code_of(table.base_rows), false, true};
  return source;
}

__device__ __forceinline__ bool is_deleted(const Index& index, i64 slot) {
  return __ldcg(index.marks + slot / SLOTS * BUCKET_BYTES + slot % SLOTS) == DELETED_MARK;
}

__device__ __forceinline__ Source find_source(const Table& table, i64 asked, bool marking, u64 policy) {
  const i64 key = stored_key(table, asked);
  const Index& cached = table.cached;
  const i64 slot = cached.num_buckets != 0 ? find_slot<true>(cached, key, place_of(cached, key), policy) : -1;
  if (slot < 0) return base_source(table, key, policy);
  if constexpr (ROWS_CHANGE) {
    if (is_deleted(table.cached, slot)) return {reinterpret_cast<const u8*>(table.default_vector), FLOAT32, false, false};
  } else if constexpr (NUM_SHARDS > 1) {
    if (is_sampling()) sample_copy(table, slot);
  } else {
    if (marking) leave_mark(table.cached, slot);
  }
  return {table.cached_rows.vectors + slot * table.cached_rows.row_bytes, code_of(table.cached_rows), true, true};
}

__device__ __forceinline__ i64 load_key(const u8* address, i64 key_bytes) {
  return key_bytes == 8 ? *reinterpret_cast<const i64*>(address) : (i64) * reinterpret_cast<const int*>(address);
}

// The keys of a segment that have no row, counted for the host. Only the first lane of a warp counts. Atomic operations in a
// line of host memory take about 1 us each, one after another, so warps add to a sum in device memory. The warp that finds 0
// there takes the sum to the host once its rows are copied, and leaves 0; what others add before that goes with it.
struct UnknownCount {
  u32 found = 1;  // in the sum; 0: this warp reports

  __device__ __forceinline__ void add(const Request& request, u32 s, u32 count) {
    if (request.num_unknown == nullptr) return;
    if (found != 0) found = atomicAdd(request.unknown_sums + s, count);
    else atomicAdd(request.unknown_sums + s, count);
  }

  __device__ __forceinline__ void report(const Request& request, u32 s) const {
    if (found == 0) atomicAdd(request.num_unknown + s * COUNT_STRIDE, (u64)atomicExch(request.unknown_sums + s, 0u));
  }
};

// Count and note what was not found; `asked` of the warp's lanes hold a key each.
__device__ __forceinline__ u32 note_missing(const Request& request, const Table& table, u32 s, bool asked,
                                            const Source& source, UnknownCount& unknown_count) {
  const u32 uncached = __ballot_sync(ALL_LANES, asked && !source.cached);
  if (uncached == 0) return 0;
  const u32 unknown = __ballot_sync(ALL_LANES, asked && !source.known);
  if (threadIdx.x % LANES == 0) {
    if (table.events != nullptr) {
      atomicAdd(table.events + MISSES, (u64)__popc(uncached));
      if (unknown) atomicAdd(table.events + UNKNOWN, (u64)__popc(unknown));
    }
    if (unknown) unknown_count.add(request, s, __popc(unknown));
  }
  return unknown;
}

// Copy the rows of those lanes that hold one of this type.
template <int CODE>
__device__ __forceinline__ void copy_if(const u8* row, int code, Output output, int dim, int num_keys, bool wide) {
  const bool these = code == CODE && output.vector != nullptr;
  if (!__any_sync(ALL_LANES, these)) return;
  if (!these) row = output.vector = nullptr;
  if (wide) copy_rows<CODE, true>(row, output, dim, num_keys);
  else copy_rows<CODE, false>(row, output, dim, num_keys);
}

__device__ __forceinline__ void copy_all(const u8* row, int code, Output output, int dim, int num_keys, bool wide) {
  copy_if<FLOAT32>(row, code, output, dim, num_keys, wide);
  if constexpr (NARROW_ROWS) {
    copy_if<FLOAT16>(row, code, output, dim, num_keys, wide);
    copy_if<INT8>(row, code, output, dim, num_keys, wide);
  }
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

// Copy the rows of a tile, one of each lane, if all are there and in float32; returns whether they were.
__device__ __forceinline__ bool copy_whole_tile(const Source& source, Output output, i64 stride, int dim) {
  if (output.narrowed || !__all_sync(ALL_LANES, source.row != nullptr && source.code == FLOAT32)) return false;
  u8* first = from_lane(output.vector, 0);
  if (dim == 128) copy_tile<32>(source.row, first, stride);
  else if (dim == 64) copy_tile<16>(source.row, first, stride);
  else if (dim == 32) copy_tile<8>(source.row, first, stride);
  else return false;
  return true;
}

// Copy rows of cached keys, then the others, closed up: these may come from host memory, where all of them are to be asked for
// at once, and no cached row waits behind one. `stride`: from the vector of a lane to that of the next; 0: it differs.
// `on_gpus`: all rows are in memory of GPUs; those of a whole tile are then copied as they come, which is faster.
__device__ __forceinline__ void copy_sources(const Source& source, Output output, i64 stride, int dim, bool wide, bool on_gpus) {
  const u32 cached = __ballot_sync(ALL_LANES, output.vector != nullptr && source.cached);
  const u32 others = __ballot_sync(ALL_LANES, output.vector != nullptr && !source.cached);
  if ((cached | others) == 0) return;
  const bool alike = cached == ALL_LANES || others == ALL_LANES || (on_gpus && (cached | others) == ALL_LANES);
  const bool in_place = stride != 0 && wide && alike;
  if (in_place && copy_whole_tile(source, output, stride, dim)) return;
  const int from = in_order(cached, others), num_keys = __popc(cached | others);
  const u8* row = from_lane(source.row, from);
  output.vector = from_lane(output.vector, from);
  copy_all(row, __shfl_sync(ALL_LANES, source.code, from), output, dim, num_keys, wide);
}

__device__ __forceinline__ bool is_wide(const Table& table, const Segment& segment) {
  const u64 output = reinterpret_cast<u64>(segment.output) | (u64)segment.output_stride;
  return table.cached_rows.wide && table.base_rows.wide && output % (4 * Output::element_bytes(segment)) == 0;
}

// The key of a lane, read before the cache is looked at.
struct Asked {
  u32 count = 0;  // keys of the tile, one per lane from the first
  bool is_one = false;  // whether this lane has a key
  i64 key = 0;
  u8* output = nullptr;
  i64 stride = 0;  // from the vector of a lane to that of the next; 0: it differs
};

// Up to `most` keys of a segment from a place on; `turns`: its keys in the order in which they are taken, null: as they come.
__device__ __forceinline__ Asked keys_of(const Request& request, const Segment& segment, i64 dim, u32 place, u32 most,
                                         const Turn* turns, u32 first_turn) {
  const u32 lane = threadIdx.x % LANES;
  Asked asked;
  asked.count = min(most, (u32)(segment.num_rows * segment.keys_per_row) - place);
  asked.is_one = lane < asked.count;
  asked.stride = turns == nullptr && segment.keys_per_row == 1 ? segment.output_stride : 0;
  if (!asked.is_one) return asked;
  u32 row = turns == nullptr ? place + lane : turns[place + lane].place - first_turn, column = 0;
  if (segment.keys_per_row != 1) {
    column = row % (u32)segment.keys_per_row;
    row /= (u32)segment.keys_per_row;
  }
  const u8* address = segment.keys + row * segment.row_stride + column * segment.key_stride;
  asked.key = turns == nullptr ? load_key(address, segment.key_bytes) : turns[place + lane].key;
  const i64 vector_bytes = dim * Output::element_bytes(segment);
  asked.output = segment.output + request.outputs + row * segment.output_stride + column * vector_bytes;
  return asked;
}

__device__ __forceinline__ void look_up_keys(const Request& request, const Segment& segment, const Table& table, u32 s,
                                             u32* missing_bits, const Asked& asked, bool marking, u64 policy) {
  Source source;
  if (asked.is_one) source = find_source(table, asked.key, marking, policy);
  UnknownCount unknown_count;
  const u32 unknown = note_missing(request, table, s, asked.is_one, source, unknown_count);
  if (unknown != 0 && missing_bits != nullptr && threadIdx.x % LANES == 0) *missing_bits = unknown;
  const bool to_copy = asked.is_one && (source.row != nullptr || request.fill);
  const Output output = {to_copy ? asked.output : nullptr, Output::is_narrowed(segment)};
  const bool on_gpus = NUM_SHARDS > 1 && table.shards[0] != nullptr;
  copy_sources(source, output, asked.stride, (int)table.dim, is_wide(table, segment), on_gpus);
  unknown_count.report(request, s);
}

__device__ __forceinline__ float larger(float a, float b) { return b > a || b != b ? b : a; }  // a NaN wins

constexpr int POOLED_IN_FLIGHT = 8;  // rows that a group of lanes loads before it adds the first
constexpr u32 SUM_BLOCK = 32;        // keys of a bag whose vectors are added up in float32, as in kernels/cpu/vectors.py

// The bags of a tile: their keys are one list, bag after bag, so that every lane finds a key's row even where bags are short.
// Lane i describes bag i.
struct Bags {
  u32 end = 0;    // where the bag ends in the list
  i64 begin = 0;  // place of its first key among those of the segment, less its place in the list
  u32 total;

  __device__ __forceinline__ Bags(const Segment& segment, u32 first, u32 count) {
    const u32 lane = threadIdx.x % LANES;
    u32 length = 0;
    if (lane < count) {
      begin = segment.begins != nullptr ? segment.begins[first + lane] : (i64)(first + lane) * segment.keys_per_row;
      length = (u32)(segment.begins != nullptr ? segment.ends[first + lane] - begin : segment.keys_per_row);
    }
    end = length;
    for (int distance = 1; distance < MAX_BAGS_PER_TILE; distance *= 2) {
      const u32 before = __shfl_up_sync(ALL_LANES, end, distance);
      if (lane >= distance) end += before;
    }
    begin -= end - length;
    total = __shfl_sync(ALL_LANES, end, MAX_BAGS_PER_TILE - 1);
  }

  __device__ __forceinline__ u32 end_of(u32 bag) const { return __shfl_sync(ALL_LANES, end, bag & (LANES - 1)); }

  // Place of a key of the list among those of the segment.
  __device__ __forceinline__ i64 place_of(u32 key, u32 count) const {
    u32 bag = 0;
    for (u32 i = 0; i + 1 < count; ++i) bag += key >= end_of(i);
    return __shfl_sync(ALL_LANES, begin, bag) + key;
  }
};

// A key by its place among those of a pooled segment.
__device__ __forceinline__ i64 load_key_at(const Segment& segment, i64 place) {
  const u8* address = segment.keys;
  if (segment.begins != nullptr) {
    address += place * segment.key_stride;
  } else {
    const u32 row = (u32)place / (u32)segment.keys_per_row;
    address += row * segment.row_stride + ((u32)place - row * (u32)segment.keys_per_row) * segment.key_stride;
  }
  return load_key(address, segment.key_bytes);
}

// What a warp has found of some keys, and sums of whole blocks of a bag: in shared memory, so that finding rows and adding
// them up need not share registers.
struct Found {
  const u8* rows[LANES];
  float weights[LANES];
  u8 codes[LANES];
  double blocks[Elements<true>::COUNT][LANES];  // of each lane's elements
};

__device__ __forceinline__ Found& found_of_warp() {
  __shared__ Found all_found[4];  // of the warps of a block
  return all_found[threadIdx.x / LANES];
}

// A bag's vector while it is being added up. The lanes that share a row are a group; groups take rows in turn. Sums in float32
// would lose digits if bags were long, so those of blocks are added up in double precision.
template <bool WIDE>
struct Sum {
  Elements<WIDE> elements;
  int step, steps, width;

  __device__ __forceinline__ void begin(bool takes_largest) {
    elements = Elements<WIDE>::all(takes_largest ? -__int_as_float(0x7f800000) : 0.0f);
  }

  __device__ __forceinline__ void add(const Elements<WIDE>& row, float weight, bool takes_largest) {
    if (takes_largest) elements = elements.with(row, [=](float a, float b) { return larger(a, b * weight); });
    else elements = elements.with(row, [=](float a, float b) { return __fadd_rn(a, __fmul_rn(b, weight)); });
  }

  // Which of the next rows this lane's group takes first. Which group takes a row depends on its place in the bag alone, so that
  // a bag has the same sum wherever it lies in a request.
  __device__ __forceinline__ u32 group_after(u32 before) const {
    return (threadIdx.x % LANES / width - before) & (LANES / width - 1);
  }

  __device__ __forceinline__ void end_block(Found& found, bool is_first) {
    float* values = reinterpret_cast<float*>(&elements);
#pragma unroll
    for (int i = 0; i < Elements<WIDE>::COUNT; ++i) {
      double& sum = found.blocks[i][threadIdx.x % LANES];
      sum = is_first ? values[i] : sum + values[i];
      values[i] = 0.0f;
    }
  }

  __device__ __forceinline__ void add_blocks(const Found& found) {
    float* values = reinterpret_cast<float*>(&elements);
#pragma unroll
    for (int i = 0; i < Elements<WIDE>::COUNT; ++i) values[i] = (float)(found.blocks[i][threadIdx.x % LANES] + values[i]);
  }

  __device__ __forceinline__ void end(const Segment& segment, const Found& found, u8* output, u32 length) {
    if (length > SUM_BLOCK && segment.pooling != MAX) add_blocks(found);
    for (int distance = width; distance < LANES; distance *= 2) {
      const Elements<WIDE> other = elements.from_lane(distance);
      if (segment.pooling == MAX) elements = elements.with(other, [](float a, float b) { return larger(a, b); });
      else elements = elements.with(other, [](float a, float b) { return a + b; });
    }
    if (length == 0) elements = Elements<WIDE>::all(0.0f);
    if (segment.pooling == MEAN && length > 0) {
      const float divisor = (float)length;
      elements = elements.with(elements, [=](float a, float) { return __fdiv_rn(a, divisor); });
    }
    if (threadIdx.x % LANES < width && step < steps) elements.store(output, step, Output::is_narrowed(segment));
  }
};

// Add rows of `found` from one on, as many as make whole rounds before `to`: all of them are there and in float32, and the
// whole warp takes each. Returns the first that is left.
__device__ __forceinline__ u32 add_rounds(const Found& found, Sum<true>& sum, u32 from, u32 to) {
  const int step = min(sum.step, sum.steps - 1);
#pragma unroll 1
  for (; from + POOLED_IN_FLIGHT <= to; from += POOLED_IN_FLIGHT) {
    Elements<true> elements[POOLED_IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < POOLED_IN_FLIGHT; ++i) elements[i] = Elements<true>::load<FLOAT32>(found.rows[from + i], step, 0);
#pragma unroll
    for (int i = 0; i < POOLED_IN_FLIGHT; ++i) sum.elements = sum.elements.with(elements[i], [](float a, float b) { return a + b; });
  }
  return from;
}

// Add rows [from, to) of `found` as they are, all of them stored as CODE. `before`: keys that the bag has before `from`.
template <int CODE, bool WIDE>
__device__ __forceinline__ void add_rows(const Found& found, Sum<WIDE>& sum, u32 from, u32 to, u32 before, int dim) {
  const u32 rows_at_once = LANES / sum.width, group = sum.group_after(before);
  const int step = min(sum.step, sum.steps - 1);
  constexpr int AT_ONCE = CODE == INT8 ? POOLED_IN_FLIGHT / 2 : POOLED_IN_FLIGHT;
#pragma unroll 1
  for (u32 place = from + group; place < to + group; place += rows_at_once * AT_ONCE) {
    Elements<WIDE> elements[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const u8* row = place + i * rows_at_once < to ? found.rows[place + i * rows_at_once] : nullptr;
      elements[i] = row != nullptr ? Elements<WIDE>::template load<CODE>(row, step, dim) : Elements<WIDE>::all(0.0f);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) sum.elements = sum.elements.with(elements[i], [](float a, float b) { return a + b; });
  }
}

// Add the first rows of `found`, each by the whole warp; `factors` are those of this lane's row. Rows of bags to come are
// asked for before a bag ends: of short bags few would be under way otherwise.
template <int CODE, typename EndBlocks>
__device__ __forceinline__ void add_rows_of_bags(const Found& found, Sum<true>& sum, u32 count, Factors factors,
                                                 EndBlocks end_blocks_at) {
  const int step = min(sum.step, sum.steps - 1);
#pragma unroll 1
  for (u32 from = 0; from < count; from += POOLED_IN_FLIGHT) {
    Stored<CODE> stored[POOLED_IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < POOLED_IN_FLIGHT; ++i) {
      const u8* row = from + i < count ? found.rows[from + i] : nullptr;
      stored[i] = row != nullptr ? Elements<true>::load_stored<CODE>(row, step) : Stored<CODE>{};
    }
#pragma unroll
    for (int i = 0; i < POOLED_IN_FLIGHT; ++i) {
      if (from + i >= count) break;
      end_blocks_at(from + i);
      const Elements<true> row = Elements<true>::widened(stored[i], CODE == INT8 ? factors.of_lane(from + i) : Factors{});
      sum.elements = sum.elements.with(row, [](float a, float b) { return a + b; });
    }
  }
}

// Rows of any type, with weights, or of which the largest elements count.
template <bool WIDE>
__device__ __forceinline__ void add_any_rows(const Found& found, Sum<WIDE>& sum, u32 from, u32 to, u32 before, int dim,
                                             bool takes_largest) {
  const u32 rows_at_once = LANES / sum.width;
  const int step = min(sum.step, sum.steps - 1);
#pragma unroll 1
  for (u32 place = from + sum.group_after(before); place < to; place += rows_at_once) {
    const u8* row = found.rows[place];
    Elements<WIDE> elements = Elements<WIDE>::all(0.0f);
    if (row == nullptr) {
      // the key has no row and its table no default vector: zeros
    } else if (found.codes[place] == FLOAT32) {
      elements = Elements<WIDE>::template load<FLOAT32>(row, step, dim);
    } else if (found.codes[place] == FLOAT16) {
      elements = Elements<WIDE>::template load<FLOAT16>(row, step, dim);
    } else {
      elements = Elements<WIDE>::template load<INT8>(row, step, dim);
    }
    sum.add(elements, found.weights[place], takes_largest);
  }
}

template <int CODE, bool WIDE>
__device__ __forceinline__ void pool_bags(const Request& request, const Segment& segment, const Table& table, u32 s, u32 first,
                                          u32 count, bool marking, u64 policy, Found& found) {
  const u32 lane = threadIdx.x % LANES;
  const bool takes_largest = segment.pooling == MAX, weighted = segment.weights != nullptr;
  const Bags bags(segment, first, count);
  UnknownCount unknown_count;
  Sum<WIDE> sum;
  sum.steps = (int)table.dim / Elements<WIDE>::COUNT;
  sum.width = lanes_per_row(sum.steps);
  for (int first_step = 0; first_step < sum.steps; first_step += sum.width) {
    sum.step = first_step + (lane & (sum.width - 1));
    sum.begin(takes_largest);
    u32 bag = 0, bag_begin = 0, block_end = min(bags.end_of(0), SUM_BLOCK);
    const auto end_blocks_at = [&](u32 place) {
      while (bag < count && block_end == place) {
        u32 bag_end = bags.end_of(bag);
        if (place == bag_end) {
          u8* output = segment.output + request.outputs + (first + bag) * segment.output_stride;
          sum.end(segment, found, output, place - bag_begin);
          sum.begin(takes_largest);
          bag_begin = place;
          bag_end = bags.end_of(++bag);
        } else if (!takes_largest) {
          sum.end_block(found, place - bag_begin == SUM_BLOCK);
        }
        block_end = min(bag_end, place + SUM_BLOCK);
      }
    };
    for (u32 base = 0; base < bags.total; base += LANES) {
      const bool asked = base + lane < bags.total;
      const i64 place = bags.place_of(base + lane, count);
      Source source;
      if (asked) source = find_source(table, load_key_at(segment, place), marking, policy);
      if (first_step == 0) note_missing(request, table, s, asked, source, unknown_count);
      __syncwarp();
      found.rows[lane] = source.row;
      found.codes[lane] = (u8)source.code;
      found.weights[lane] = weighted && asked ? segment.weights[place] : 1.0f;
      const bool same = !weighted && !takes_largest && !__any_sync(ALL_LANES, source.row != nullptr && source.code != CODE);
      const bool whole = same && sum.width == LANES && !__any_sync(ALL_LANES, asked && source.row == nullptr);
      __syncwarp();
      const u32 stop = min((u32)LANES, bags.total - base);
      if constexpr (WIDE && CODE != FLOAT32) {  // whose rows would not all fit into registers
        if (same && sum.width == LANES) {
          const Factors factors = Factors::load<CODE>(source.row, (int)table.dim);
          add_rows_of_bags<CODE>(found, sum, stop, factors, [&](u32 place) { end_blocks_at(base + place); });
          continue;
        }
      }
      for (u32 from = 0; from < stop;) {
        end_blocks_at(base + from);
        const u32 to = min(stop, block_end - base);
        if constexpr (WIDE && CODE == FLOAT32) {
          if (whole) from = add_rounds(found, sum, from, to);
        }
        const u32 before = base + from - bag_begin;
        if (same) add_rows<CODE, WIDE>(found, sum, from, to, before, (int)table.dim);
        else add_any_rows<WIDE>(found, sum, from, to, before, (int)table.dim, takes_largest);
        from = to;
      }
    }
    end_blocks_at(bags.total);
  }
  unknown_count.report(request, s);
}

template <bool WIDE>
__device__ __forceinline__ void pool_any(const Request& request, const Segment& segment, const Table& table, u32 s, u32 first,
                                         u32 count, bool marking, u64 policy) {
  Found& found = found_of_warp();
  const int code = code_of(ROWS_CHANGE ? table.base_rows : table.cached_rows);  // of most rows
  if (code == FLOAT16) pool_bags<FLOAT16, WIDE>(request, segment, table, s, first, count, marking, policy, found);
  else if (code == INT8) pool_bags<INT8, WIDE>(request, segment, table, s, first, count, marking, policy, found);
  else pool_bags<FLOAT32, WIDE>(request, segment, table, s, first, count, marking, policy, found);
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

__device__ __forceinline__ void look_up_tile(const Request& request, const Segment& segment, const Table& table, u32 s,
                                             u32 tile, u32 first_tile, u64 policy) {
  const u32 place = (tile - first_tile) * request.keys_per_tile;
  const Asked asked = keys_of(request, segment, table.dim, place, request.keys_per_tile, nullptr, 0);
  u32* missing_bits = request.missing_bits != nullptr ? request.missing_bits + tile : nullptr;
  look_up_keys(request, segment, table, s, missing_bits, asked, is_marking(tile, request.seed), policy);
}

// The segments that are taken in order, by few warps, each of which takes twice as many keys in turn as it can have rows of
// under way: all rows that are read at one time are then close together.
__device__ __forceinline__ void look_up_in_order(const Request& request) {
  const u32 warp = this_tile(), num_warps = request.num_ordered_blocks * (blockDim.x / LANES);
  const u64 policy = keeping_policy();
  for (u32 s = 0; s < request.num_segments; ++s) {
    const u32 begin = request.few_begins[s];
    if (begin == NOT_ORDERED) continue;
    const Segment& segment = request.few_segments[s];
    const Table& table = request.tables[segment.table];
    const u32 num_keys = (u32)(segment.num_rows * segment.keys_per_row);
    const u32 at_once = min(LANES, 2 * IN_FLIGHT * LANES / lanes_per_row(max(1, (int)table.dim / 4)));
    for (u32 place = warp * at_once; place < num_keys; place += num_warps * at_once) {
      const Asked asked = keys_of(request, segment, table.dim, place, at_once, request.order + begin, begin);
      look_up_keys(request, segment, table, s, nullptr, asked, false, policy);
    }
  }
}

// Whether this warp has a tile, and which; if it has none, it may have taken others' keys in order.
__device__ __forceinline__ bool takes_tile(const Request& request, u32& tile) {
  tile = this_tile();
  if constexpr (IN_ORDER) {
    if (blockIdx.x < request.num_ordered_blocks) {
      look_up_in_order(request);
      return false;
    }
    tile -= request.num_ordered_blocks * (blockDim.x / LANES);
  }
  return tile < request.num_tiles;
}

// For few segments, none of them pooled: these stay in the parameters' own memory.
extern "C" __global__ void __launch_bounds__(256) look_up(const __grid_constant__ Request request) {
  u32 tile;
  const bool exists = takes_tile(request, tile);
  const u32 s = exists ? segment_of(request.few_tiles, request.num_segments, tile) : 0;
  const Segment& segment = request.few_segments[s];
  const Table& table = request.tables[segment.table];
  if (!exists || (IN_ORDER && request.few_begins[s] != NOT_ORDERED)) return;
  look_up_tile(request, segment, table, s, tile, request.few_tiles[s], keeping_policy());
}

__device__ __forceinline__ void look_up_or_pool(const Request& request, u32 tile) {
  const u64 policy = keeping_policy();
  const u32* first_tiles = request.first_tiles != nullptr ? request.first_tiles : request.few_tiles;
  const u32 s = segment_of(first_tiles, request.num_segments, tile);
  if (IN_ORDER && request.few_begins[s] != NOT_ORDERED) return;
  const Segment& segment = request.segments != nullptr ? request.segments[s] : request.few_segments[s];
  const Table& table = request.tables[segment.table];
  if (segment.pooling == NONE) {
    look_up_tile(request, segment, table, s, tile, first_tiles[s], policy);
    return;
  }
  const bool marking = is_marking(tile, request.seed);
  const u32 num_bags = (u32)segment.num_rows, num_tiles = first_tiles[s + 1] - first_tiles[s];
  const u32 bags_per_tile = (num_bags + num_tiles - 1) / num_tiles, first = (tile - first_tiles[s]) * bags_per_tile;
  const u32 count = min(bags_per_tile, num_bags - first);
  if (is_wide(table, segment)) pool_any<true>(request, segment, table, s, first, count, marking, policy);
  else pool_any<false>(request, segment, table, s, first, count, marking, policy);
}

// For any segments.
extern "C" __global__ void __launch_bounds__(128, 6) look_up_and_pool(const __grid_constant__ Request request) {
  u32 tile;
  if (takes_tile(request, tile)) look_up_or_pool(request, tile);
}
