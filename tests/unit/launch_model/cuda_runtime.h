// A stand-in of CUDA's launch model in C++, as far as csrc/*_kernels.cu use it: every thread of a block is a fiber, and
// a barrier or a shuffle is where fibers change. Kernels compile against this folder instead of CUDA's headers.
//
// The order of the fibers is another one after each barrier, and so is that of the blocks: what stands only because of
// an order shows. A block whose threads do not all reach a barrier ends the program, as it would hang a GPU.

#pragma once

#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static // blocks run one after another

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct alignas(16) uint4 { // as in CUDA: 16 bytes are read and written at multiples of 16
  uint32_t x, y, z, w;
};

inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  return {x, y, z, w};
}

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace launch_model {

constexpr unsigned kWarp = 32, kMostThreads = 1024;
constexpr size_t kStackBytes = 1 << 18;

enum class State { kReady, kAtBarrier, kAtShuffle, kDone };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  State state;
  unsigned shuffles; // so far; values of neighbouring shuffles have places of their own
  void* fake_stack = nullptr;
};

inline std::vector<Fiber> fibers;
inline std::vector<uint64_t> shuffled; // two by thread
inline ucontext_t scheduler;
inline void* scheduler_fake_stack;
inline const void* scheduler_stack;
inline size_t scheduler_stack_bytes;
inline std::function<void()> body;
inline unsigned num_threads, current;
inline uint32_t random_state = 1;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "launch model: %s (block %u)\n", what, blockIdx.x);
  std::exit(2);
}

inline uint32_t draw() {
  random_state = random_state * 1664525u + 1013904223u;
  return random_state >> 8;
}

inline void to_scheduler(bool for_good) {
  Fiber& fiber = fibers[current];
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fiber.fake_stack, scheduler_stack, scheduler_stack_bytes);
#endif
  swapcontext(&fiber.context, &scheduler);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &scheduler_stack, &scheduler_stack_bytes);
#endif
}

inline void run_fiber() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
  body();
  fibers[current].state = State::kDone;
  to_scheduler(true);
}

inline void to_fiber(unsigned number) {
  current = number;
  threadIdx = dim3(number, 0, 0);
  Fiber& fiber = fibers[number];
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, fiber.stack.get(), kStackBytes);
#endif
  swapcontext(&scheduler, &fiber.context);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
}

inline bool all_in(unsigned begin, unsigned end, State state) {
  for (unsigned i = begin; i < end; ++i) {
    if (fibers[i].state != state) {
      return false;
    }
  }
  return true;
}

inline void release(unsigned begin, unsigned end) {
  for (unsigned i = begin; i < end; ++i) {
    fibers[i].state = State::kReady;
  }
}

inline void run_block() {
  for (unsigned i = 0; i < num_threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.state = State::kReady;
    fiber.shuffles = 0;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
  while (!all_in(0, num_threads, State::kDone)) {
    bool moved = false;
    const unsigned start = draw(), stride = draw() | 1u; // odd: visits all of a power of two
    for (unsigned i = 0; i < num_threads; ++i) {
      const unsigned number = (start + i * stride) % num_threads;
      if (fibers[number].state == State::kReady) {
        to_fiber(number);
        moved = true;
      }
    }
    for (unsigned warp = 0; warp < num_threads; warp += kWarp) {
      if (all_in(warp, warp + kWarp, State::kAtShuffle)) {
        release(warp, warp + kWarp);
        moved = true;
      }
    }
    if (all_in(0, num_threads, State::kAtBarrier)) {
      release(0, num_threads);
      moved = true;
    }
    if (!moved) {
      fail("threads of a block wait at different barriers");
    }
  }
}

inline void wait(State state) {
  fibers[current].state = state;
  to_scheduler(false);
}

} // namespace launch_model

// --------------------------------------------------------------------------------------------------- in a kernel

inline void __syncthreads() {
  launch_model::wait(launch_model::State::kAtBarrier);
}

inline unsigned long long __shfl_down_sync(unsigned mask, unsigned long long value, unsigned distance) {
  using namespace launch_model;
  if (mask != 0xFFFFFFFFu) {
    fail("only whole warps shuffle here");
  }
  const unsigned place = fibers[current].shuffles++ % 2;
  shuffled[2 * current + place] = value;
  wait(State::kAtShuffle);
  const unsigned lane = current % kWarp;
  return lane + distance < kWarp ? shuffled[2 * (current + distance) + place] : value;
}

inline unsigned long long atomicAdd(unsigned long long* target, unsigned long long value) {
  return std::exchange(*target, *target + value);
}

template <typename T>
T __ldcs(const T* source) {
  return *source;
}

template <typename T>
void __stcs(T* target, T value) {
  *target = value;
}

inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>(((uint64_t{high} << 32) | low) >> (shift % 32));
}

inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float __fadd_rn(float one, float other) {
  return one + other;
}

inline float __fmul_rn(float one, float other) {
  return one * other;
}

inline uint32_t min(uint32_t one, uint32_t other) {
  return one < other ? one : other;
}

// --------------------------------------------------------------------------------------------------- on the host

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1 };
inline const char* cudaGetErrorString(cudaError_t) {
  return "an error";
}
using cudaStream_t = void*;

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

inline cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t num_bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(target, source, num_bytes);
  return cudaSuccess;
}

template <typename... Expected, typename... Actual>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Expected...), Actual... arguments) {
  using namespace launch_model;
  num_threads = config->blockDim.x;
  const bool is_power = num_threads >= kWarp && num_threads <= kMostThreads && (num_threads & (num_threads - 1)) == 0;
  if (config->gridDim.x == 0 || config->gridDim.x >= 1u << 31 || !is_power) {
    return cudaErrorInvalidConfiguration;
  }
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  fibers.resize(num_threads);
  shuffled.resize(2 * num_threads);
  body = [&] { kernel(static_cast<Expected>(arguments)...); };
  const unsigned start = draw() % gridDim.x;
  for (unsigned i = 0; i < gridDim.x; ++i) {
    blockIdx = dim3((start + i) % gridDim.x, 0, 0);
    run_block();
  }
  return cudaSuccess;
}
