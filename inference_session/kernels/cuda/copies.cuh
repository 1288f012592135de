// Rows of the lanes of a warp, copied to the outputs of a look-up.

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
  __shared__ u8 lanes[8][LANES];  // of the warps of a block
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
