// The order in which a look-up takes keys whose rows lie in host memory: by region of these rows. A GPU remembers few
// translations of host addresses, so that one of them should serve many rows. On one stream, after `counts` was cleared:
//
//   note_regions   each key, the region of its row, and how many keys of that region were noted before
//   begin_regions  where in the order each region begins
//   order_keys     the keys, region after region
//
// Keys may lie in host memory too, where each read costs as much as one of a short row: they are read once, side by side.

struct alignas(16) Noted {
  i64 key;
  u32 region;
  u32 rank;  // among the keys of the region
};

// How the rows of a segment are divided; kernels/cuda/records.py numbers the regions.
struct SegmentRegions {
  u32 first;
  u32 rows_per_region;
};

extern "C" __global__ void __launch_bounds__(128)
    note_regions(const __grid_constant__ Request request, const SegmentRegions* regions, u32* counts, Noted* noted) {
  const u32 tile = this_tile();
  if (tile >= request.num_tiles) return;
  const u32 s = segment_of(request.few_tiles, request.num_segments, tile), begin = request.few_begins[s];
  if (begin == NOT_ORDERED) return;
  const Segment& segment = request.few_segments[s];
  const u32 lane = threadIdx.x % LANES, place = (tile - request.few_tiles[s]) * request.keys_per_tile + lane;
  if (lane >= request.keys_per_tile || place >= segment.num_rows * segment.keys_per_row) return;
  const i64 key = load_key_at(segment, place);
  const i64 row = find_base_row(request.tables[segment.table], key);
  const u32 region = regions[s].first + (row < 0 ? 0 : (u32)(row / regions[s].rows_per_region));
  noted[begin + place] = {key, region, atomicAdd(counts + region, 1)};
}

// By one block: counts become the sums of those before them.
extern "C" __global__ void __launch_bounds__(1024) begin_regions(u32* counts, u32 num_regions) {
  __shared__ u32 totals[LANES];  // of the warps
  const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  u32 begin = 0;
  for (u32 first = 0; first < num_regions; first += blockDim.x) {
    const u32 region = first + threadIdx.x, count = region < num_regions ? counts[region] : 0;
    u32 end = count;
    for (int distance = 1; distance < LANES; distance *= 2) {
      const u32 before = __shfl_up_sync(ALL_LANES, end, distance);
      if (lane >= distance) end += before;
    }
    if (lane == LANES - 1) totals[warp] = end;
    __syncthreads();
    u32 before = 0, total = 0;
    for (u32 w = 0; w < blockDim.x / LANES; ++w) {
      if (w < warp) before += totals[w];
      total += totals[w];
    }
    if (region < num_regions) counts[region] = begin + before + end - count;
    begin += total;
    __syncthreads();
  }
}

// begins: of the regions.
extern "C" __global__ void order_keys(const Noted* noted, const u32* begins, u32 num_keys, Turn* order) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < num_keys) order[begins[noted[i].region] + noted[i].rank] = {noted[i].key, i};
}
