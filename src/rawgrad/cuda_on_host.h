// Lets the host's C++ compiler run a CUDA kernel: one fiber a thread, one block at a time, threads in order.
// So __syncthreads() works, __shared__ memory can be static, and the same launch always gives the same result.
// What it does not have (warp intrinsics, dynamic shared memory) is a compile error.
#define _XOPEN_SOURCE 700  // macOS hides ucontext without it,
#define _DARWIN_C_SOURCE   // and then much else without this
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __constant__ static
#define __shared__ static  // one block runs at a time, so one copy is enough
#define __syncthreads() cuda_on_host::yield()

struct uint3 { unsigned x, y, z; };
static uint3 threadIdx, blockIdx, blockDim, gridDim;

using std::max;
using std::min;

template <typename Number, typename Addend>
Number atomicAdd(Number* cell, Addend addend) {  // no other thread runs meanwhile
  const Number old = *cell;
  *cell = old + static_cast<Number>(addend);
  return old;
}
inline unsigned __float_as_uint(float number) { unsigned bits; std::memcpy(&bits, &number, 4); return bits; }
inline float __uint_as_float(unsigned bits) { float number; std::memcpy(&number, &bits, 4); return number; }

namespace cuda_on_host {
constexpr size_t STACK = 64 << 10;  // bytes a thread
struct Fiber { ucontext_t context; bool done; };
static ucontext_t scheduler;
static Fiber* running;
static void (*body)(void*);
static void* body_arguments;

inline void yield() { swapcontext(&running->context, &scheduler); }
inline void enter() { body(body_arguments); running->done = true; yield(); }

inline void run_block() {
  static std::vector<Fiber> fibers;
  static std::unique_ptr<char[]> stacks;
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  if (fibers.size() < threads) { fibers.resize(threads); stacks.reset(new char[STACK * threads]); }
  for (unsigned i = 0; i < threads; i++) {
    getcontext(&fibers[i].context);
    fibers[i].context.uc_stack.ss_sp = &stacks[STACK * i];
    fibers[i].context.uc_stack.ss_size = STACK;
    fibers[i].context.uc_link = &scheduler;
    fibers[i].done = false;
    makecontext(&fibers[i].context, enter, 0);
  }
  for (bool alive = true; alive;) {  // once round for every barrier
    alive = false;
    for (unsigned i = 0; i < threads; i++) {
      if (fibers[i].done) continue;
      running = &fibers[i];
      threadIdx = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
      swapcontext(&scheduler, &running->context);
      alive |= !running->done;
    }
  }
}

template <typename... Parameters>
struct Call {
  void (*kernel)(Parameters...);
  void** arguments;
  template <size_t... I>
  void unpack(std::index_sequence<I...>) { kernel(*static_cast<Parameters*>(arguments[I])...); }
  static void run(void* call) { static_cast<Call*>(call)->unpack(std::index_sequence_for<Parameters...>{}); }
};

// The arguments as the CUDA driver takes them: an array of pointers, one to each.
template <typename... Parameters>
void launch(void (*kernel)(Parameters...), const unsigned* grid, const unsigned* block, void** arguments) {
  Call<Parameters...> call{kernel, arguments};
  body = Call<Parameters...>::run;
  body_arguments = &call;
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  for (unsigned z = 0; z < grid[2]; z++)
    for (unsigned y = 0; y < grid[1]; y++)
      for (unsigned x = 0; x < grid[0]; x++) { blockIdx = {x, y, z}; run_block(); }
  std::fflush(stdout);
}
}  // namespace cuda_on_host
