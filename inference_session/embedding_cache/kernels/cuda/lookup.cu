// The look-up of a request: any number of tables and segments in one launch. A warp takes one tile: some keys of one segment,
// each with a vector of its own in the output, or the one bag of a pooled vector.

// Rows that are unpublished while a look-up runs are not written to before it has ended (write.cu): so no row is ever read
// half. Each block reports when it begins and ends.
struct Reading {
  Readers* readers;
  u64 epoch;

  __device__ __forceinline__ explicit Reading(Readers* all) : readers(all), epoch(0) {
    if (readers == nullptr) return;
    if (threadIdx.x == 0) {
      epoch = atomicAdd(&readers->arrivals, 1ull) >> 32;
      __threadfence();
    }
    __syncthreads();
  }

  __device__ __forceinline__ void end() {
    if (readers == nullptr) return;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(&readers->departures[epoch & 1], 1ull);
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
constexpr int HITS_PER_MARK_BITS = 4;  // of so many hits, as a power of two, one leaves a mark

// The row below the cache; -1: none.
__device__ __forceinline__ i64 find_base_row(const Table& table, i64 key, u64 hashed, u64 policy) {
  if (table.base_by_number) {
    const i64 row = key < 0 ? key + table.num_base_rows : key;
    return (u64)row < (u64)table.num_base_rows ? row : -1;
  }
  if (table.base.num_buckets == 0) return -1;
  const i64 slot = find_slot(table.base, key, hashed, policy);
  return slot >= 0 ? (i64)__ldcg(table.base_numbers + slot) : -1;
}

__device__ __forceinline__ Source find_source(const Table& table, i64 key, u32 seed, u64 policy) {
  const u64 hashed = hash_key(key);
  const Index cached = table.cached;
  Source source;
  i64 slot = -1;
  if (cached.num_buckets != 0) slot = find_slot(cached, key, hashed, policy);
  if (slot >= 0) {
    const Rows rows = table.cached_rows;
    source = {rows.vectors + slot * rows.row_bytes, (int)rows.code, true, true};
    if ((((u32)(hashed >> 20) + seed) * 2654435761u) >> (32 - HITS_PER_MARK_BITS) == 0) {
      cached.marks[slot / SLOTS * BUCKET_BYTES + slot % SLOTS] = MAX_MARK;
    }
  } else {
    const i64 row = find_base_row(table, key, hashed, policy);
    source.row = reinterpret_cast<const u8*>(table.default_vector);
    if (row >= 0) {
      const Rows rows = table.base_rows;
      source = {rows.vectors + row * rows.row_bytes, (int)rows.code, false, true};
    }
  }
  return source;
}

__device__ __forceinline__ i64 load_key(const u8* address, i64 key_bytes) {
  return key_bytes == 8 ? *reinterpret_cast<const i64*>(address) : (i64) * reinterpret_cast<const int*>(address);
}

// Count and note what was not found; `asked` of the warp's lanes hold a key each.
__device__ __forceinline__ u32 note_missing(const Request& request, const Table& table, u32 s, i64 t, bool asked, i64 key,
                                            const Source& source) {
  const u32 uncached = __ballot_sync(ALL_LANES, asked && !source.cached);
  if (uncached == 0) return 0;
  const u32 unknown = __ballot_sync(ALL_LANES, asked && !source.known);
  const int lane = threadIdx.x % LANES;
  u64 place = 0;
  if (lane == 0) {
    if (table.events != nullptr) {
      atomicAdd(table.events + MISSES, (u64)__popc(uncached));
      if (unknown) atomicAdd(table.events + UNKNOWN, (u64)__popc(unknown));
    }
    if (unknown && request.num_unknown != nullptr) atomicAdd(request.num_unknown + s, (u64)__popc(unknown));
    if (unknown && request.missing != nullptr) place = atomicAdd(&request.missing->count, (u64)__popc(unknown));
  }
  if (unknown && request.missing != nullptr) {
    place = __shfl_sync(ALL_LANES, place, 0) + __popc(unknown & ((1u << lane) - 1));
    if (unknown >> lane & 1) request.missing->keys[place] = {t, key};
  }
  return unknown;
}

// Copy the rows of those lanes that hold one of this type.
template <int CODE>
__device__ __forceinline__ void copy_if(const u8* row, int code, u8* output, int dim, int num_keys, bool wide) {
  const bool these = code == CODE && output != nullptr;
  if (!__any_sync(ALL_LANES, these)) return;
  if (!these) row = output = nullptr;
  if (wide) copy_rows<CODE, true>(row, output, dim, num_keys);
  else copy_rows<CODE, false>(row, output, dim, num_keys);
}

__device__ __forceinline__ void copy_all(const u8* row, int code, u8* output, int dim, int num_keys, bool wide) {
  copy_if<FLOAT32>(row, code, output, dim, num_keys, wide);
  copy_if<FLOAT16>(row, code, output, dim, num_keys, wide);
  copy_if<INT8>(row, code, output, dim, num_keys, wide);
}

// Copy cached rows, then the others, closed up: these may come from host memory, where all of them are to be asked for at
// once, and no cached row waits behind one.
__device__ __forceinline__ void copy_sources(const Source& source, u8* output, int dim, int num_keys, bool wide) {
  const u32 others = __ballot_sync(ALL_LANES, output != nullptr && !source.cached);
  if (others != ALL_LANES) copy_all(source.row, source.code, source.cached ? output : nullptr, dim, num_keys, wide);
  if (others == 0) return;
  const int lane = threadIdx.x % LANES, num_others = __popc(others);
  const int from = lane < num_others ? __fns(others, 0, lane + 1) : 0;
  const u8* row = from_lane(source.row, from);
  u8* to = from_lane(output, from);
  const int code = __shfl_sync(ALL_LANES, source.code, from);
  copy_all(row, code, lane < num_others ? to : nullptr, dim, num_others, wide);
}

__device__ __forceinline__ bool is_wide(const Table& table, const Segment& segment) {
  const u64 output = reinterpret_cast<u64>(segment.output) | (u64)segment.output_stride;
  return table.cached_rows.wide && table.base_rows.wide && (output & 15) == 0;
}

__device__ __forceinline__ void look_up_keys(const Request& request, const Segment& segment, const Table& table, u32 s,
                                             u32 tile, u32 first_tile, u64 policy) {
  const u32 lane = threadIdx.x % LANES, begin = (tile - first_tile) * request.keys_per_tile;
  const u32 num_keys = min(request.keys_per_tile, (u32)(segment.num_rows * segment.keys_per_row) - begin);
  const bool asked = lane < num_keys;
  const int dim = (int)table.dim;
  u32 row = begin + lane, column = 0;
  if (segment.keys_per_row != 1) {
    column = row % (u32)segment.keys_per_row;
    row /= (u32)segment.keys_per_row;
  }
  Source source;
  i64 key = 0;
  u8* output = nullptr;
  if (asked) {
    key = load_key(segment.keys + row * segment.row_stride + column * segment.key_stride, segment.key_bytes);
    source = find_source(table, key, request.seed, policy);
    if (source.row != nullptr || request.fill) {
      output = segment.output + row * segment.output_stride + (i64)column * dim * 4;
    }
  }
  const u32 unknown = note_missing(request, table, s, segment.table, asked, key, source);
  if (request.missing_bits != nullptr && lane == 0) request.missing_bits[tile] = unknown;
  copy_sources(source, output, dim, num_keys, is_wide(table, segment));
}

template <bool WIDE>
__device__ __forceinline__ Elements<WIDE> load_any(const u8* row, int code, int step, int dim) {
  if (row == nullptr) return Elements<WIDE>::all(0.0f);
  if (code == FLOAT32) return Elements<WIDE>::template load<FLOAT32>(row, step, dim);
  if (code == FLOAT16) return Elements<WIDE>::template load<FLOAT16>(row, step, dim);
  return Elements<WIDE>::template load<INT8>(row, step, dim);
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

template <bool WIDE>
__device__ __forceinline__ void pool_bag(const Request& request, const Segment& segment, const Table& table, u32 s, u32 row,
                                         u64 policy) {
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
        source = find_source(table, key, request.seed, policy);
        if (bag.weights != nullptr) weight = bag.weights[first + lane];
      }
      if (first_step == 0) note_missing(request, table, s, segment.table, asked, key, source);
#pragma unroll 4
      for (int i = 0; i < count; i += rows_at_once) {
        const int place = (i + group) & (LANES - 1);
        const u8* from = from_lane(source.row, place);
        const int code = __shfl_sync(ALL_LANES, source.code, place);
        const float factor = __shfl_sync(ALL_LANES, weight, place);
        if (i + group < count) {
          const Elements<WIDE> elements = load_any<WIDE>(from, code, step, dim);
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
    if (group == 0 && first_step + member < steps) pooled.store(segment.output + row * segment.output_stride, step);
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
  if (tile < request.num_tiles) {
    const u32 s = segment_of(request.few_tiles, request.num_segments, tile);
    const Table& table = request.tables[request.few_segments[s].table];
    look_up_keys(request, request.few_segments[s], table, s, tile, request.few_tiles[s], keeping_policy());
  }
  reading.end();
}

// For any segments.
extern "C" __global__ void __launch_bounds__(256) look_up_and_pool(const __grid_constant__ Request request) {
  Reading reading(request.readers);
  const u32 tile = this_tile();
  if (tile < request.num_tiles) {
    const u64 policy = keeping_policy();
    const u32* first_tiles = request.first_tiles != nullptr ? request.first_tiles : request.few_tiles;
    const u32 s = segment_of(first_tiles, request.num_segments, tile);
    const Segment& segment = request.segments != nullptr ? request.segments[s] : request.few_segments[s];
    const Table& table = request.tables[segment.table];
    if (segment.pooling == NONE) {
      look_up_keys(request, segment, table, s, tile, first_tiles[s], policy);
    } else if (is_wide(table, segment)) {
      pool_bag<true>(request, segment, table, s, tile - first_tiles[s], policy);
    } else {
      pool_bag<false>(request, segment, table, s, tile - first_tiles[s], policy);
    }
  }
  reading.end();
}
