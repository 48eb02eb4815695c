// Stands in for CUDA's header of this name, so that the host compiler can build csrc/step/cuda_kernel.h: a thread block
// is a set of coroutines that switch wherever lanes wait for each other.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__ static
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __shared__ static
#define SHARDOPT_DYNAMIC_SHARED(name) uint4* const name = emulation::dynamic_shared.get()

struct Index {
  unsigned x;
};
inline Index threadIdx, blockIdx, blockDim;

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

// As on the device, a misaligned access is an error.
template <class T>
T __ldcs(const T* from) {
  if (reinterpret_cast<uintptr_t>(from) % alignof(T)) abort();
  return *from;
}
template <class T>
void __stcs(T* to, T value) {
  if (reinterpret_cast<uintptr_t>(to) % alignof(T)) abort();
  *to = value;
}

inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
inline uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }

inline unsigned long long atomicAdd(unsigned long long* to, unsigned long long value) {
  const unsigned long long old = *to;
  *to += value;
  return old;
}

inline unsigned long long atomicMax(unsigned long long* to, unsigned long long value) {
  const unsigned long long old = *to;
  if (value > old) *to = value;
  return old;
}

namespace emulation {

constexpr unsigned kWarp = 32;

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

// Where a coroutine or the scheduler goes on. swapcontext also exchanges signal masks, a system call that takes longer
// than most of what lanes do between two waits.
struct Place {
  ucontext_t context;
  jmp_buf registers;
  bool entered = false;

  // Goes on at another place, and comes back when somebody goes on here.
  void leave_for(Place& other) {
    if (_setjmp(registers)) return;
    if (std::exchange(other.entered, true)) _longjmp(other.registers, 1);
    setcontext(&other.context);
  }
};

struct Thread {
  Place place;
  bool done = false;
  int32_t value = 0;                      // what it hands to the lanes of its warp
  int64_t waits = 0;                      // how often it has waited
  std::vector<Copy> begun;                // asynchronous copies, not yet committed
  std::deque<std::vector<Copy>> batches;  // committed ones that nobody has waited for
};

struct Block {
  std::vector<Thread> threads;
  Place scheduler;
  std::function<void()> kernel;
};
inline Block* running = nullptr;
inline std::vector<std::unique_ptr<char[]>> stacks;  // of threads, kept for the next block

inline std::unique_ptr<uint4[]> dynamic_shared;  // of the launch

inline int64_t agreements = 0;  // of all lanes of a warp: what they asked of each other was so

inline Thread& current() { return running->threads[threadIdx.x]; }

inline void enter() {
  running->kernel();
  current().done = true;
  current().place.leave_for(running->scheduler);
}

// Hands over to the next thread; comes back when all of the block, but those that are done, have come here.
inline void wait() {
  Thread& thread = current();
  ++thread.waits;
  thread.place.leave_for(running->scheduler);
}

// Runs one thread block.
inline void run_block(unsigned threads, const std::function<void()>& kernel) {
  Block block;
  block.threads.resize(threads);
  block.kernel = kernel;
  block.scheduler.entered = true;
  running = &block;
  blockDim.x = threads;
  constexpr size_t kStack = 64 * 1024;
  while (stacks.size() < threads) stacks.emplace_back(new char[kStack]);
  for (unsigned i = 0; i < threads; ++i) {
    Thread& thread = block.threads[i];
    ucontext_t& context = thread.place.context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks[i].get();
    context.uc_stack.ss_size = kStack;
    context.uc_link = nullptr;
    makecontext(&context, enter, 0);
  }
  for (bool left = true; left;) {
    left = false;
    for (unsigned i = 0; i < threads; ++i) {
      if (block.threads[i].done) continue;
      threadIdx.x = i;
      block.scheduler.leave_for(block.threads[i].place);
      left |= !block.threads[i].done;
    }
    // A lane that is done or elsewhere while another of its warp waits for it would hang or misread on the device.
    for (unsigned i = 1; i < threads; ++i) {
      if (i % kWarp == 0) continue;
      const Thread &a = block.threads[i - 1], &b = block.threads[i];
      if (a.done != b.done || a.waits != b.waits) abort();
    }
  }
  running = nullptr;
}

}  // namespace emulation

inline void __syncthreads() { emulation::wait(); }
inline void __syncwarp() { emulation::wait(); }

inline int32_t __shfl_xor_sync(uint32_t, int32_t value, int lane_bits) {
  emulation::current().value = value;
  emulation::wait();
  const int32_t got = emulation::running->threads[threadIdx.x ^ static_cast<unsigned>(lane_bits)].value;
  emulation::wait();  // nobody may hand over the next value before all have read this one
  return got;
}

inline bool __any_sync(uint32_t, bool condition) {
  emulation::current().value = condition;
  emulation::wait();
  const unsigned first = threadIdx.x / emulation::kWarp * emulation::kWarp;
  bool any = false;
  for (unsigned lane = 0; lane < emulation::kWarp; ++lane) any |= emulation::running->threads[first + lane].value != 0;
  emulation::wait();
  return any;
}

inline bool __all_sync(uint32_t members, bool condition) {
  const bool all = !__any_sync(members, !condition);
  emulation::agreements += all && threadIdx.x % emulation::kWarp == 0;
  return all;
}

// Asynchronous copies are done as late as they may be, so that a kernel that does not wait for them reads what was
// there before. A misaligned one is an error, as on the device.
inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
  if (bytes != 4 && bytes != 8 && bytes != 16) abort();
  if (reinterpret_cast<uintptr_t>(to) % bytes || reinterpret_cast<uintptr_t>(from) % bytes) abort();
  emulation::current().begun.push_back({to, from, bytes});
}

inline void __pipeline_commit() {
  emulation::Thread& thread = emulation::current();
  thread.batches.push_back(std::move(thread.begun));
  thread.begun.clear();
}

inline void __pipeline_wait_prior(size_t batches) {
  std::deque<std::vector<emulation::Copy>>& waiting = emulation::current().batches;
  for (; waiting.size() > batches; waiting.pop_front()) {
    for (const emulation::Copy& copy : waiting.front()) std::memcpy(copy.to, copy.from, copy.bytes);
  }
}
