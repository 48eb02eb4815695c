// The step on the CPU.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "step/cpu_targets.h"

namespace shardopt {

// Steps of the same kernel rows, which are cut into tasks once.
class CpuStep {
 public:
  // The caller owns the kernel rows and must not change their sizes.
  CpuStep(const KernelRow* kernel_rows, int64_t count);

  // Makes the following steps run on at most `threads` threads with a target's kernels. The results depend on neither.
  void prepare(int threads, const std::string& target);

  // Steps all kernel rows and returns the number of elements that were skipped. Cannot fail.
  int64_t run(const GroupRow* groups, const float* const* tables, Phase phase) noexcept;

 private:
  struct Task {
    const KernelRow* kernel_row;
    int64_t begin, end;  // blocks
  };
  // The tasks that one thread begins with: neighbours, and in every step the same tasks, so that their memory stays
  // near the thread.
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
  const CpuTarget* target_ = nullptr;
};

}  // namespace shardopt
