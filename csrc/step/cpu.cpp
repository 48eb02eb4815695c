#include "step/cpu.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "step/thread_pool.h"

namespace shardopt {
namespace {

constexpr int64_t kTaskElements = 131072;
constexpr int64_t kWorthAThread = 32768;  // elements: with less to do, a thread costs more than it brings

using KernelOf = CpuKernel (*)(int codec, int rule);

struct Task {
  const TensorEntry* entry;
  CpuKernel kernel;
  int64_t begin, end;  // blocks
};

// The tasks that one thread begins with: neighbours, and the same ones in every step, so that memory stays near it.
struct alignas(64) Share {
  std::atomic<size_t> next{0};
  size_t end = 0;
};

struct Work {
  const CpuCall& call;
  std::vector<Task> tasks;
  std::vector<Share> shares;
  std::atomic<int64_t> nonfinite{0};
};

// A thread that is done with its own share helps with the others'.
void run_tasks(void* context, int worker) {
  Work& work = *static_cast<Work*>(context);
  int64_t nonfinite = 0;
  for (size_t offset = 0; offset < work.shares.size(); ++offset) {
    Share& share = work.shares[(static_cast<size_t>(worker) + offset) % work.shares.size()];
    for (size_t i; (i = share.next.fetch_add(1)) < share.end;) {
      const Task& task = work.tasks[i];
      nonfinite += task.kernel(work.call, *task.entry, task.begin, task.end);
    }
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
  Work work{call, {}, {}};
  int64_t elements = 0;
  for (int64_t i = 0; i < entries; ++i) elements += call.entries[i].rows * call.entries[i].cols;
  const int64_t useful = std::min<int64_t>((elements + kWorthAThread - 1) / kWorthAThread, std::max(threads, 1));
  const int64_t task_elements = std::min(kTaskElements, elements / (4 * std::max<int64_t>(useful, 1)) + 1);
  for (int64_t i = 0; i < entries; ++i) {
    const TensorEntry& entry = call.entries[i];
    const CpuKernel kernel = kernel_of(entry.codec, call.groups[entry.group].rule);
    const int64_t blocks = entry.rows * ((entry.cols + entry.block_size - 1) / entry.block_size);
    const int64_t blocks_per_task = std::max<int64_t>(1, task_elements / entry.block_size);
    for (int64_t begin = 0; begin < blocks; begin += blocks_per_task) {
      work.tasks.push_back({&entry, kernel, begin, std::min(begin + blocks_per_task, blocks)});
    }
  }
  if (work.tasks.empty()) return 0;
  const size_t workers = static_cast<size_t>(std::max<int64_t>(useful, 1)), count = work.tasks.size();
  work.shares = std::vector<Share>(workers);
  for (size_t w = 0; w < workers; ++w) {
    work.shares[w].next = count * w / workers;
    work.shares[w].end = count * (w + 1) / workers;
  }
  run_on_threads(static_cast<int>(workers), run_tasks, &work);
  return work.nonfinite;
}

}  // namespace shardopt
