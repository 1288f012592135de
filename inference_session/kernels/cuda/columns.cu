// The last columns of a matrix: those that the host gives, which are read from its pinned memory, and zeros behind them.
// `columns`: the first of them in the first row, float32 or, narrowed, float16; rows are `row_bytes` apart.
extern "C" __global__ void write_columns(const float* given, u32 num_given, u8* columns, u32 num_columns, i64 row_bytes,
                                         u32 num_rows, u32 narrowed) {
  const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  const u64 row = i / num_columns;
  const u32 column = i % num_columns;
  if (row >= num_rows) return;
  const float value = column < num_given ? given[row * num_given + column] : 0.0f;
  u8* output = columns + row * row_bytes;
  if (narrowed) reinterpret_cast<unsigned short*>(output)[column] = (unsigned short)narrow(value);
  else reinterpret_cast<float*>(output)[column] = value;
}
