// Where the row of a key is: in the cache, below it, or nowhere. Nothing is written to tables meanwhile.

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
__device__ __forceinline__ void leave_mark(const Index& index, const Place& place, i64 slot) {
  u8* mark = index.marks + line_place(place, slot);
  if (*mark != MAX_MARK) *mark = MAX_MARK;
}

__device__ __forceinline__ void sample_copy(const Table& table, const Place& place, i64 slot) {
  leave_mark(table.cached, place, slot);
  if (takes_samples(table)) atomicAdd(&table.samples->copies_read, 1ull);
}

// The one key that a row is kept under: row numbers that count from the end become those that count from the start.
__device__ __forceinline__ i64 stored_key(const Table& table, i64 key) {
  return key < 0 && key >= -table.num_row_numbers ? key + table.num_row_numbers : key;
}

// The row below the cache; -1: none. The key is one that `stored_key` gave.
__device__ __forceinline__ i64 find_base_row(const Table& table, i64 key) {
  if (table.num_row_numbers != 0) return (u64)key < (u64)table.num_base_rows ? key : -1;
  if (table.base.num_buckets == 0) return -1;
  const i64 slot = find_slot<true>(table.base, key, place_of(table.base, key));
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

__device__ __forceinline__ Source base_source(const Table& table, i64 key) {
  Source source;
  const i64 row = find_base_row(table, key);
  source.row = reinterpret_cast<const u8*>(table.default_vector);
  if (row >= 0) source = {base_row(table, key, row), code_of(table.base_rows), false, true};
  return source;
}

__device__ __forceinline__ bool is_deleted(const Index& index, const Place& place, i64 slot) {
  return __ldcg(index.marks + line_place(place, slot)) == DELETED_MARK;
}

__device__ __forceinline__ Source find_source(const Table& table, i64 asked, bool marking) {
  const i64 key = stored_key(table, asked);
  const Index& cached = table.cached;
  if (cached.num_buckets == 0) return base_source(table, key);
  const Place place = place_of(cached, key);
  const i64 slot = find_slot<true>(cached, key, place);
  if (slot < 0) return base_source(table, key);
  if constexpr (ROWS_CHANGE) {
    if (is_deleted(cached, place, slot)) return {reinterpret_cast<const u8*>(table.default_vector), FLOAT32, false, false};
  } else if constexpr (NUM_SHARDS > 1) {
    if (is_sampling()) sample_copy(table, place, slot);
  } else {
    if (marking) leave_mark(cached, place, slot);
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
