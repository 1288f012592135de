// Enough of CUDA C++ to run its kernels on a processor, slowly: the threads of a block are coroutines that take turns. What
// the lanes of a warp do together waits until each of them has arrived; where they arrive at different places, or some have
// ended, a GPU may do anything, and here the launch fails and says where. Threads switch by jumps: a change of contexts would
// call the system each time.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
// Blocks run one after another. What they share lies together, so that it can be overwritten before each.
#define __shared__ static __attribute__((section("shared_memory")))
extern char __start_shared_memory[], __stop_shared_memory[];

struct Dimensions {
  unsigned x, y = 0;
};
static Dimensions threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

template <typename A, typename B>
inline auto min(A a, B b) { std::common_type_t<A, B> x = a, y = b; return y < x ? y : x; }
template <typename A, typename B>
inline auto max(A a, B b) { std::common_type_t<A, B> x = a, y = b; return x < y ? y : x; }

namespace emulated {

constexpr unsigned WARP = 32;
constexpr size_t STACK_BYTES = 1 << 17;
constexpr int ACTIVE_MASK = -2;  // in place of a line

struct Thread {
  ucontext_t start;
  bool started = false;
  jmp_buf place;  // where it goes on once it has started
  std::unique_ptr<char[]> stack;
  bool ended = true;
  int line = 0;       // where it waits for others; 0: nowhere
  unsigned mask = 0;  // for which lanes of its warp; 0: for all threads of the block
  uint64_t given = 0;  // what these may read then
};

static std::vector<Thread> threads;
static jmp_buf scheduler;
static unsigned current = 0, turn = 1;
static std::function<void()> body;
static std::string failure;

inline void run_body() {
  body();
  threads[current].ended = true;
  _longjmp(scheduler, 1);
}

inline void arrive(int line, unsigned mask) {
  Thread& thread = threads[current];
  thread.line = line;
  thread.mask = mask;
  if (_setjmp(thread.place) == 0) _longjmp(scheduler, 1);
}

inline void resume(unsigned i) {
  current = i;
  threadIdx = {i % blockDim.x, i / blockDim.x};
  Thread& thread = threads[i];
  if (_setjmp(scheduler) != 0) return;
  if (thread.started) _longjmp(thread.place, 1);
  thread.started = true;
  setcontext(&thread.start);
}

// Lets the threads of `begin` and on whose bit is set go on, if all of them wait at one line; fails otherwise.
inline void release(unsigned begin, unsigned mask) {
  const int line = threads[begin + __builtin_ctz(mask)].line;
  for (unsigned i = 0; i < WARP; ++i) {
    if (!(mask >> i & 1)) continue;
    const Thread& thread = threads[begin + i];
    if (thread.ended || thread.line != line) {
      const std::string there = thread.ended ? "has ended" : "is at line " + std::to_string(thread.line / 2);
      failure = "in block " + std::to_string(blockIdx.x) + ", line " + std::to_string(line / 2) + " waits for thread " +
                std::to_string(begin + i) + ", which " + there;
      return;
    }
  }
  for (unsigned i = 0; i < WARP; ++i) {
    if (mask >> i & 1) threads[begin + i].line = 0;
  }
}

inline unsigned running(unsigned begin) {
  unsigned mask = 0;
  for (unsigned i = 0; i < WARP; ++i) mask |= (unsigned)!threads[begin + i].ended << i;
  return mask;
}

// Runs a warp until it has ended or waits for the block. Lanes go on in another order each time, so that those that should
// have waited for others read what these have not written yet.
inline void run_warp(unsigned begin) {
  while (failure.empty()) {
    turn = turn * 1664525 + 1013904223;
    for (unsigned i = 0; i < WARP; ++i) {
      Thread& thread = threads[begin + (i ^ turn >> 27)];
      if (!thread.ended && thread.line == 0) resume(&thread - threads.data());
    }
    const unsigned left = running(begin);
    if (left == 0) return;
    const Thread& first = threads[begin + __builtin_ctz(left)];
    if (first.mask == 0) return;
    release(begin, first.line == ACTIVE_MASK ? left : first.mask);
  }
}

inline bool all_ended(unsigned num_threads) {
  return std::all_of(threads.begin(), threads.begin() + num_threads, [](const Thread& thread) { return thread.ended; });
}

inline void run_block(unsigned num_threads) {
  threads.resize(std::max<size_t>(threads.size(), num_threads));
  for (unsigned i = 0; i < num_threads; ++i) {
    Thread& thread = threads[i];
    if (!thread.stack) thread.stack.reset(new char[STACK_BYTES]);
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = thread.stack.get();
    thread.start.uc_stack.ss_size = STACK_BYTES;
    thread.started = thread.ended = false;
    thread.line = 0;
    makecontext(&thread.start, run_body, 0);
  }
  while (failure.empty() && !all_ended(num_threads)) {
    for (unsigned begin = 0; begin < num_threads; begin += WARP) run_warp(begin);
    if (!failure.empty() || all_ended(num_threads)) return;
    for (unsigned begin = 0; begin < num_threads; begin += WARP) release(begin, ~0u);
  }
}

// Returns what was wrong, or nothing.
inline const char* launch(unsigned num_blocks, Dimensions block_shape, std::function<void()> kernel) {
  failure.clear();
  body = std::move(kernel);
  gridDim.x = num_blocks;
  blockDim = block_shape;
  for (unsigned block = 0; block < num_blocks && failure.empty(); ++block) {
    blockIdx.x = block;
    memset(__start_shared_memory, 0xa5, __stop_shared_memory - __start_shared_memory);
    run_block(blockDim.x * blockDim.y);
  }
  return failure.c_str();
}

// Launches a kernel whose arguments lie at these addresses.
template <typename... Arguments>
const char* launch_with(unsigned num_blocks, Dimensions block_shape, void (*kernel)(Arguments...), void** addresses) {
  return launch(num_blocks, block_shape, [=] {
    void** next = addresses;
    std::tuple<Arguments...> arguments{*static_cast<Arguments*>(*next++)...};  // braces: from left to right
    std::apply(kernel, arguments);
  });
}

// Calls `combine` with each lane of `mask` and what it gives here.
template <typename Combine>
inline void together(int line, unsigned mask, uint64_t given, Combine combine) {
  const unsigned begin = current / WARP * WARP;
  threads[current].given = given;
  arrive(2 * line, mask);
  for (unsigned i = 0; i < WARP; ++i) {
    if (mask >> i & 1) combine(i, threads[begin + i].given);
  }
  arrive(2 * line + 1, mask);  // until all have read
}

template <typename T>
inline T shuffle(int line, unsigned mask, T value, unsigned from) {
  static_assert(sizeof(T) <= 8, "a lane gives 8 bytes");
  uint64_t given = 0, taken = 0;
  memcpy(&given, &value, sizeof(T));
  together(line, mask, given, [&](unsigned lane, uint64_t other) {
    if (lane == from % WARP) taken = other;
  });
  memcpy(&value, &taken, sizeof(T));
  return value;
}

inline unsigned ballot(int line, unsigned mask, bool value) {
  unsigned votes = 0;
  together(line, mask, value, [&](unsigned lane, uint64_t other) { votes |= (unsigned)(other != 0) << lane; });
  return votes;
}

inline unsigned match_any(int line, unsigned mask, uint64_t value) {
  unsigned same = 0;
  together(line, mask, value, [&](unsigned lane, uint64_t other) { same |= (unsigned)(other == value) << lane; });
  return same;
}

inline unsigned lane() { return current % WARP; }

inline unsigned active_mask() {
  const unsigned begin = current / WARP * WARP;
  arrive(ACTIVE_MASK, ~0u);
  const unsigned mask = running(begin);
  arrive(ACTIVE_MASK, ~0u);
  return mask;
}

inline float from_half(unsigned short bits) {
  _Float16 value;
  memcpy(&value, &bits, 2);
  return (float)value;
}

inline unsigned short to_half(float value) {
  const _Float16 narrow = (_Float16)value;
  unsigned short bits;
  memcpy(&bits, &narrow, 2);
  return bits;
}

}  // namespace emulated

#define __shfl_sync(mask, value, from) emulated::shuffle(__LINE__, mask, value, from)
#define __shfl_up_sync(mask, value, distance) \
  emulated::shuffle(__LINE__, mask, value, emulated::lane() >= (distance) ? emulated::lane() - (distance) : emulated::lane())
#define __shfl_xor_sync(mask, value, distance) emulated::shuffle(__LINE__, mask, value, emulated::lane() ^ (distance))
#define __ballot_sync(mask, value) emulated::ballot(__LINE__, mask, value)
#define __any_sync(mask, value) (emulated::ballot(__LINE__, mask, value) != 0)
#define __all_sync(mask, value) (emulated::ballot(__LINE__, mask, !(value)) == 0)
#define __match_any_sync(mask, value) emulated::match_any(__LINE__, mask, value)
#define __syncwarp() emulated::arrive(2 * __LINE__, ~0u)
#define __syncthreads() emulated::arrive(2 * __LINE__, 0)
#define __activemask() emulated::active_mask()
#define __threadfence()

template <typename T> inline T __ldca(const T* address) { return *address; }
template <typename T> inline T __ldcg(const T* address) { return *address; }
template <typename T> inline T __ldg(const T* address) { return *address; }
template <typename T> inline void __stcs(T* address, T value) { *address = value; }

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs((int)bits); }
inline int __ffsll(unsigned long long bits) { return __builtin_ffsll((long long)bits); }
inline int __clz(unsigned bits) { return bits ? __builtin_clz(bits) : 32; }
inline int __clzll(unsigned long long bits) { return bits ? __builtin_clzll(bits) : 64; }
inline float __int_as_float(int bits) { float value; memcpy(&value, &bits, 4); return value; }
inline float __uint_as_float(unsigned bits) { return __int_as_float((int)bits); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline unsigned __vsubus4(unsigned a, unsigned b) {
  unsigned all = 0;
  for (int shift = 0; shift < 32; shift += 8) {
    const unsigned x = a >> shift & 255, y = b >> shift & 255;
    all |= (x > y ? x - y : 0) << shift;
  }
  return all;
}
template <typename T, typename U> inline T atomicAdd(T* address, U value) { const T old = *address; *address += (T)value; return old; }
template <typename T> inline T atomicExch(T* address, T value) { const T old = *address; *address = value; return old; }
template <typename T, typename U, typename V> inline T atomicCAS(T* address, U expected, V value) {
  const T old = *address;
  if (old == (T)expected) *address = (T)value;
  return old;
}
template <typename T, typename U> inline T atomicMax(T* address, U value) { const T old = *address; *address = std::max(old, (T)value); return old; }
