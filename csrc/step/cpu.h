// The step on the CPU.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "step/cpu_call.h"

namespace shardopt {

// The instruction sets that this machine runs, best first: "avx512vbmi", "avx512", "avx2", "neon", "portable".
std::vector<std::string> cpu_targets();

// Throws std::invalid_argument for a target that this machine does not run.
void check_target(const std::string& target);

using KernelOf = CpuKernel (*)(int codec, int rule);

// Steps of the same kernel rows, which are cut into tasks once.
class CpuStep {
 public:
  // The kernel rows stay the caller's; their sizes must not change.
  CpuStep(const KernelRow* kernel_rows, int64_t count);

  // Has the steps that follow run on at most `threads` threads with a target's kernels. Their results depend on
  // neither.
  void prepare(int threads, const std::string& target);

  // Steps all kernel rows and returns the number of elements that were skipped. Cannot fail.
  int64_t run(const GroupRow* groups, const float* const* tables, Phase phase) noexcept;

 private:
  struct Task {
    const KernelRow* kernel_row;
    int64_t begin, end;  // blocks
  };
  // The tasks that one thread begins with: neighbours, and the same ones in every step, so that memory stays near it.
  struct alignas(64) Share {
    size_t begin, end;
    std::atomic<size_t> next;
  };
  struct Work;

  void deal_out(int threads);
  static void run_tasks(void* work, int worker);

  const KernelRow* const kernel_rows_;
  const int64_t count_;
  int threads_ = 0;
  std::vector<Task> tasks_;
  std::vector<Share> shares_;
  std::string target_;
  KernelOf kernel_of_ = nullptr;  // of the target
};

}  // namespace shardopt
