// The look-up of a request: any number of tables and segments in one launch. A warp takes one tile: some keys of one segment,
// each with a vector of its own in the output, or some bags of a pooled one.

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
  asked.output = segment.output + row * segment.output_stride + column * vector_bytes;
  return asked;
}

__device__ __forceinline__ void look_up_keys(const Request& request, const Segment& segment, const Table& table, u32 s,
                                             u32* missing_bits, const Asked& asked, bool marking) {
  Source source;
  if (asked.is_one) source = find_source(table, asked.key, marking);
  UnknownCount unknown_count;
  const u32 unknown = note_missing(request, table, s, asked.is_one, source, unknown_count);
  if (unknown != 0 && missing_bits != nullptr && threadIdx.x % LANES == 0) *missing_bits = unknown;
  const bool to_copy = asked.is_one && source.row != nullptr;
  const Output output = {to_copy ? asked.output : nullptr, Output::is_narrowed(segment)};
  const bool on_gpus = NUM_SHARDS > 1 && table.shards[0] != nullptr;
  copy_sources(source, output, asked.stride, (int)table.dim, is_wide(table, segment), on_gpus);
  unknown_count.report(request, s);
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
                                             u32 tile, u32 first_tile) {
  const u32 place = (tile - first_tile) * request.keys_per_tile;
  const Asked asked = keys_of(request, segment, table.dim, place, request.keys_per_tile, nullptr, 0);
  u32* missing_bits = request.missing_bits != nullptr ? request.missing_bits + tile : nullptr;
  look_up_keys(request, segment, table, s, missing_bits, asked, is_marking(tile, request.seed));
}

// The segments that are taken in order, by few warps, each of which takes twice as many keys in turn as it can have rows of
// under way: all rows that are read at one time are then close together.
__device__ __forceinline__ void look_up_in_order(const Request& request) {
  const u32 warp = this_tile(), num_warps = request.num_ordered_blocks * (blockDim.x / LANES);
  for (u32 s = 0; s < request.num_segments; ++s) {
    const u32 begin = request.few_begins[s];
    if (begin == NOT_ORDERED) continue;
    const Segment& segment = request.few_segments[s];
    const Table& table = request.tables[segment.table];
    const u32 num_keys = (u32)(segment.num_rows * segment.keys_per_row);
    const u32 at_once = min(LANES, 2 * IN_FLIGHT * LANES / lanes_per_row(max(1, (int)table.dim / 4)));
    for (u32 place = warp * at_once; place < num_keys; place += num_warps * at_once) {
      const Asked asked = keys_of(request, segment, table.dim, place, at_once, request.order + begin, begin);
      look_up_keys(request, segment, table, s, nullptr, asked, false);
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
  look_up_tile(request, segment, table, s, tile, request.few_tiles[s]);
}

// A tile and the segment that it belongs to.
struct Tile {
  u32 number, s, first_of_segment, num_of_segment;

  __device__ __forceinline__ Tile(const Request& request, u32 number) : number(number) {
    const u32* first_tiles = request.first_tiles != nullptr ? request.first_tiles : request.few_tiles;
    s = segment_of(first_tiles, request.num_segments, number);
    first_of_segment = first_tiles[s];
    num_of_segment = first_tiles[s + 1] - first_of_segment;
  }

  __device__ __forceinline__ const Segment& segment(const Request& request) const {
    return request.segments != nullptr ? request.segments[s] : request.few_segments[s];
  }

  // The first of its bags, and how many there are.
  __device__ __forceinline__ uint2 bags(const Segment& segment) const {
    const u32 num_bags = (u32)segment.num_rows, bags_per_tile = (num_bags + num_of_segment - 1) / num_of_segment;
    const u32 first = (number - first_of_segment) * bags_per_tile;
    return make_uint2(first, min(bags_per_tile, num_bags - first));
  }
};

// The kernel itself pools the usual bags: few registers do for these, so that many warps run at once. All else is done by a
// function of its own, so that it takes no registers from them.
__device__ __noinline__ void look_up_or_pool_any(const Request& request, u32 number) {
  const Tile tile(request, number);
  if (IN_ORDER && request.few_begins[tile.s] != NOT_ORDERED) return;
  const Segment& segment = tile.segment(request);
  const Table& table = request.tables[segment.table];
  if (segment.pooling == NONE) {
    look_up_tile(request, segment, table, tile.s, number, tile.first_of_segment);
    return;
  }
  const uint2 bags = tile.bags(segment);
  const bool marking = is_marking(number, request.seed);
  if (is_wide(table, segment)) pool_any<true>(request, segment, table, tile.s, bags.x, bags.y, marking);
  else pool_any<false>(request, segment, table, tile.s, bags.x, bags.y, marking);
}

template <bool ONE_STEP>
__device__ __forceinline__ void pool_usual(const Request& request, const Tile& tile) {
  const Segment& segment = tile.segment(request);
  const uint2 bags = tile.bags(segment);
  const bool marking = is_marking(tile.number, request.seed);
  pool_bags<FLOAT32, true, true, ONE_STEP>(request, segment, request.tables[segment.table], tile.s, bags.x, bags.y, marking);
}

// For any segments.
extern "C" __global__ void __launch_bounds__(128, NARROW_ROWS ? 6 : 8) look_up_and_pool(const __grid_constant__ Request request) {
  u32 number;
  if (!takes_tile(request, number)) return;
  const Tile tile(request, number);
  const Segment& segment = tile.segment(request);
  const Table& table = request.tables[segment.table];
  if (!are_usual(segment, table)) look_up_or_pool_any(request, number);
  else if (table.dim <= 2 * LANES || table.dim > 4 * LANES) pool_usual<false>(request, tile);
  else pool_usual<true>(request, tile);
}
