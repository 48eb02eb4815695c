#include "step/cpu.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "step/thread_pool.h"

namespace shardopt {
namespace {

constexpr int64_t kTaskElements = 32768;

using KernelOf = CpuKernel (*)(int codec, int rule);

struct Task {
  const TensorEntry* entry;
  CpuKernel kernel;
  int64_t begin, end;  // blocks
};

struct Work {
  const CpuCall& call;
  std::vector<Task> tasks;
  std::atomic<size_t> next{0};
  std::atomic<int64_t> nonfinite{0};
};

void run_tasks(void* context, int) {
  Work& work = *static_cast<Work*>(context);
  int64_t nonfinite = 0;
  for (size_t i; (i = work.next.fetch_add(1)) < work.tasks.size();) {
    const Task& task = work.tasks[i];
    nonfinite += task.kernel(work.call, *task.entry, task.begin, task.end);
  }
  work.nonfinite += nonfinite;
}

KernelOf kernels_of(const std::string& target) {
  const std::vector<std::string> usable = cpu_targets();
  if (std::find(usable.begin(), usable.end(), target) == usable.end()) {
    throw std::invalid_argument("got target '" + target + "', which this CPU does not run; see cpu_targets()");
  }
#if defined(__x86_64__)
  if (target == "avx512vbmi") return avx512vbmi::cpu_kernel;
  if (target == "avx512") return avx512::cpu_kernel;
  if (target == "avx2") return avx2::cpu_kernel;
#endif
  return portable::cpu_kernel;
}

}  // namespace

std::vector<std::string> cpu_targets() {
  std::vector<std::string> targets;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    if (__builtin_cpu_supports("avx512vbmi")) targets.push_back("avx512vbmi");
    targets.push_back("avx512");
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) targets.push_back("avx2");
#endif
  targets.push_back("portable");
  return targets;
}

int64_t step_cpu(const CpuCall& call, int64_t entries, int threads, const std::string& target) {
  const KernelOf kernel_of = kernels_of(target);
  Work work{call, {}};
  for (int64_t i = 0; i < entries; ++i) {
    const TensorEntry& entry = call.entries[i];
    const CpuKernel kernel = kernel_of(entry.codec, call.groups[entry.group].rule);
    const int64_t blocks = entry.rows * ((entry.cols + entry.block_size - 1) / entry.block_size);
    const int64_t blocks_per_task = std::max<int64_t>(1, kTaskElements / entry.block_size);
    for (int64_t begin = 0; begin < blocks; begin += blocks_per_task) {
      work.tasks.push_back({&entry, kernel, begin, std::min(begin + blocks_per_task, blocks)});
    }
  }
  const int workers = static_cast<int>(std::min<size_t>(std::max(threads, 1), work.tasks.size()));
  if (workers > 0) run_on_threads(workers, run_tasks, &work);
  return work.nonfinite;
}

}  // namespace shardopt
