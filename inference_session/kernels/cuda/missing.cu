// The vectors of keys that a cache lacked, which are in host memory, into the outputs of a look-up. A warp copies one.

extern "C" __global__ void copy_vectors(const VectorCopy* copies, u32 n) {
  const u32 i = blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
  if (i >= n) return;
  const VectorCopy copy = copies[i];
  for (i64 element = threadIdx.x % LANES; element < copy.dim; element += LANES) {
    const float value = copy.vector[element];
    if (copy.code == FLOAT16) reinterpret_cast<unsigned short*>(copy.output)[element] = (unsigned short)narrow(value);
    else reinterpret_cast<float*>(copy.output)[element] = value;
  }
}
