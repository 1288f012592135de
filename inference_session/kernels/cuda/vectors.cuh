// Rows as vectors of float32, whatever they are stored as. Lanes of a warp share a row: each takes four elements of it at a
// time (`WIDE`), or one where dimension or alignment allow no more.

#ifndef IN_FLIGHT
#define IN_FLIGHT 4
#endif
constexpr int TILE_IN_FLIGHT = 8;  // of rows in float32 that are all there, which take fewer registers

__device__ __forceinline__ float widen(u32 half_bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)half_bits));
  return value;
}

__device__ __forceinline__ u32 narrow(float value) {
  unsigned short half_bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half_bits) : "f"(value));
  return half_bits;
}

// By way of the first-level cache: a launch only reads rows that it does not write, see index.cuh.
template <typename T>
__device__ __forceinline__ T load_row(const T* address) {
  return __ldca(address);
}

__device__ __forceinline__ float load_unaligned_float(const u8* address) {
  u32 bits = 0;
  for (int i = 0; i < 4; ++i) bits |= (u32)load_row(address + i) << (8 * i);
  return __uint_as_float(bits);
}

// How many lanes share a row of `steps` steps: a power of two.
__device__ __forceinline__ int lanes_per_row(int steps) { return steps >= LANES ? LANES : 1 << (32 - __clz(steps - 1)); }

// Four elements of a row as they are stored: while rows are under way, narrow ones take fewer registers so.
template <int CODE>
struct Stored;

template <>
struct Stored<FLOAT32> {
  float4 values;
};

template <>
struct Stored<FLOAT16> {
  uint2 bits;
};

template <>
struct Stored<INT8> {
  u32 bits;
};

// What turns the elements of an int8 row into floats; other rows have none.
struct Factors {
  float scale = 0.0f, bias = 0.0f;

  template <int CODE>
  __device__ __forceinline__ static Factors load(const u8* row, int dim) {
    if (CODE != INT8 || row == nullptr) return {};
    const float* factors = reinterpret_cast<const float*>(row + dim);
    return {load_row(factors), load_row(factors + 1)};
  }

  __device__ __forceinline__ Factors of_lane(u32 lane) const {
    return {__shfl_sync(ALL_LANES, scale, lane), __shfl_sync(ALL_LANES, bias, lane)};
  }
};

template <bool WIDE>
struct Elements;

template <>
struct Elements<true> {
  static constexpr int COUNT = 4;
  float4 values;

  __device__ __forceinline__ static Elements all(float value) { return {make_float4(value, value, value, value)}; }

  template <int CODE>
  __device__ __forceinline__ static Stored<CODE> load_stored(const u8* row, int step) {
    if constexpr (CODE == FLOAT32) {
      return {load_row(reinterpret_cast<const float4*>(row) + step)};
    } else if constexpr (CODE == FLOAT16) {
      return {load_row(reinterpret_cast<const uint2*>(row) + step)};
    } else {
      return {load_row(reinterpret_cast<const u32*>(row) + step)};
    }
  }

  __device__ __forceinline__ static Elements widened(const Stored<FLOAT32>& stored, Factors) { return {stored.values}; }

  __device__ __forceinline__ static Elements widened(const Stored<FLOAT16>& stored, Factors) {
    const uint2 bits = stored.bits;
    return {make_float4(widen(bits.x & 0xffff), widen(bits.x >> 16), widen(bits.y & 0xffff), widen(bits.y >> 16))};
  }

  __device__ __forceinline__ static Elements widened(const Stored<INT8>& stored, Factors factors) {
    const u32 bits = stored.bits;
    const float scale = factors.scale, bias = factors.bias;
    return {make_float4(scaled(bits, scale, bias), scaled(bits >> 8, scale, bias), scaled(bits >> 16, scale, bias),
                        scaled(bits >> 24, scale, bias))};
  }

  template <int CODE>
  __device__ __forceinline__ static Elements load(const u8* row, int step, int dim) {
    return widened(load_stored<CODE>(row, step), Factors::load<CODE>(row, dim));
  }

  __device__ __forceinline__ static float scaled(u32 bits, float scale, float bias) {
    return __fadd_rn(__fmul_rn((float)(signed char)(bits & 0xff), scale), bias);
  }

  __device__ __forceinline__ void store(u8* output, int step, bool narrowed) const {
    if (narrowed) {
      const uint2 bits = {narrow(values.x) | narrow(values.y) << 16, narrow(values.z) | narrow(values.w) << 16};
      __stcs(reinterpret_cast<uint2*>(output) + step, bits);
    } else {
      __stcs(reinterpret_cast<float4*>(output) + step, values);
    }
  }

  template <typename Operation>
  __device__ __forceinline__ Elements with(const Elements& other, Operation operation) const {
    return {make_float4(operation(values.x, other.values.x), operation(values.y, other.values.y),
                        operation(values.z, other.values.z), operation(values.w, other.values.w))};
  }

  __device__ __forceinline__ Elements from_lane(int distance) const {
    return {make_float4(__shfl_xor_sync(ALL_LANES, values.x, distance), __shfl_xor_sync(ALL_LANES, values.y, distance),
                        __shfl_xor_sync(ALL_LANES, values.z, distance), __shfl_xor_sync(ALL_LANES, values.w, distance))};
  }
};

template <>
struct Elements<false> {
  static constexpr int COUNT = 1;
  float values;

  __device__ __forceinline__ static Elements all(float value) { return {value}; }

  template <int CODE>
  __device__ __forceinline__ static Elements load(const u8* row, int step, int dim) {
    if constexpr (CODE == FLOAT32) {
      return {load_row(reinterpret_cast<const float*>(row) + step)};
    } else if constexpr (CODE == FLOAT16) {
      return {widen(load_row(reinterpret_cast<const unsigned short*>(row) + step))};
    } else {
      const float scale = load_unaligned_float(row + dim), bias = load_unaligned_float(row + dim + 4);
      return {__fadd_rn(__fmul_rn((float)(signed char)load_row(row + step), scale), bias)};
    }
  }

  __device__ __forceinline__ void store(u8* output, int step, bool narrowed) const {
    if (narrowed) __stcs(reinterpret_cast<unsigned short*>(output) + step, (unsigned short)narrow(values));
    else __stcs(reinterpret_cast<float*>(output) + step, values);
  }

  template <typename Operation>
  __device__ __forceinline__ Elements with(const Elements& other, Operation operation) const {
    return {operation(values, other.values)};
  }

  __device__ __forceinline__ Elements from_lane(int distance) const {
    return {__shfl_xor_sync(ALL_LANES, values, distance)};
  }
};

template <typename T>
__device__ __forceinline__ T* from_lane(T* address, int lane) {
  return reinterpret_cast<T*>(__shfl_sync(ALL_LANES, reinterpret_cast<u64>(address), lane));
}

// How rows are stored.
__device__ __forceinline__ int code_of(const Rows& rows) { return NARROW_ROWS ? (int)rows.code : FLOAT32; }

// Where the vectors of a segment go: per lane, and as what.
struct Output {
  u8* vector;
  bool narrowed;  // float16 instead of float32

  __device__ __forceinline__ static bool is_narrowed(const Segment& segment) {
    return NARROW_OUTPUTS && segment.output_code == FLOAT16;
  }

  __device__ __forceinline__ static int element_bytes(const Segment& segment) { return is_narrowed(segment) ? 2 : 4; }
};

// Copy a row of 4 * WIDTH elements in float32 of each lane to vectors `stride` bytes apart.
template <int WIDTH>
__device__ __forceinline__ void copy_tile(const u8* row, u8* output, i64 stride) {
  constexpr int ROWS_AT_ONCE = LANES / WIDTH;
  const int lane = threadIdx.x % LANES, member = lane % WIDTH, group = lane / WIDTH;
  output += group * stride;
#pragma unroll 1
  for (int first = 0; first < LANES; first += ROWS_AT_ONCE * TILE_IN_FLIGHT) {
    float4 values[TILE_IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < TILE_IN_FLIGHT; ++i) {
      const u8* from = from_lane(row, first + i * ROWS_AT_ONCE + group);
      values[i] = load_row(reinterpret_cast<const float4*>(from) + member);
    }
#pragma unroll
    for (int i = 0; i < TILE_IN_FLIGHT; ++i) {
      __stcs(reinterpret_cast<float4*>(output) + member, values[i]);
      output += ROWS_AT_ONCE * stride;
    }
  }
}

// Copy one row per lane, all lanes of the warp working on every row: `row` to `output`, both per lane. No output: nothing
// is copied; no row: zeros are.
template <int CODE, bool WIDE>
__device__ __forceinline__ void copy_rows(const u8* row, Output output, int dim, int num_keys) {
  const int lane = threadIdx.x % LANES;
  const int steps = dim / Elements<WIDE>::COUNT;
  const int width = lanes_per_row(steps), rows_at_once = LANES / width;
  const int member = lane & (width - 1), group = lane / width;
  for (int first = 0; first < num_keys; first += rows_at_once * IN_FLIGHT) {
    for (int step = member; step - member < steps; step += width) {
      Elements<WIDE> elements[IN_FLIGHT];
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; ++i) {
        const int key = first + i * rows_at_once + group;
        const u8* from = from_lane(row, key & (LANES - 1));
        const bool there = from != nullptr && key < num_keys && step < steps;
        elements[i] = there ? Elements<WIDE>::template load<CODE>(from, step, dim) : Elements<WIDE>::all(0.0f);
      }
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; ++i) {
        const int key = first + i * rows_at_once + group;
        u8* to = from_lane(output.vector, key & (LANES - 1));
        if (to != nullptr && key < num_keys && step < steps) elements[i].store(to, step, output.narrowed);
      }
    }
  }
}
