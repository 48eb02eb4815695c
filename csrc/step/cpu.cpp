#include "step/cpu.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "threads/pool.h"

namespace shardopt {
namespace {

constexpr int64_t kTaskElements = 131072;
constexpr size_t kFetchedAhead = 4;       // tasks
constexpr int64_t kWorthAThread = 32768;  // elements: for fewer, a thread costs more time than it saves

// Fetches a kernel row's operands: small tensors lie anywhere, so the processor cannot foresee their addresses.
void fetch(const KernelRow& kernel_row) {
  const auto one = [](uint64_t address) { __builtin_prefetch(reinterpret_cast<const void*>(address), 1); };
  one(kernel_row.param);
  one(kernel_row.gradient);
  for (int k = 0; k < kMaxMoments; ++k) {
    one(kernel_row.codes[k]);
    one(kernel_row.scales[k]);
  }
}

}  // namespace

const std::vector<CpuTarget>& cpu_targets() {
  static const std::vector<CpuTarget> targets = [] {
    std::vector<CpuTarget> found;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      if (__builtin_cpu_supports("avx512vbmi"))
        found.push_back({"avx512vbmi", avx512vbmi::cpu_kernel, avx512::norm_kernels});
      found.push_back({"avx512", avx512::cpu_kernel, avx512::norm_kernels});
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
      found.push_back({"avx2", avx2::cpu_kernel, avx2::norm_kernels});
#elif defined(__aarch64__)
    found.push_back({"neon", neon::cpu_kernel, neon::norm_kernels});  // every AArch64 processor has NEON
#endif
    found.push_back({"portable", portable::cpu_kernel, portable::norm_kernels});
    return found;
  }();
  return targets;
}

const CpuTarget& cpu_target(const std::string& name) {
  for (const CpuTarget& target : cpu_targets()) {
    if (target.name == name) return target;
  }
  throw std::invalid_argument("got target '" + name + "', which this CPU does not run; see cpu_targets()");
}

struct CpuStep::Work {
  CpuStep& step;
  const StepCall call;
  std::atomic<int64_t> nonfinite{0};
};

CpuStep::CpuStep(const KernelRow* kernel_rows, int64_t count) : kernel_rows_(kernel_rows), count_(count) {}

void CpuStep::deal_out(int threads) {
  int64_t elements = 0;
  for (int64_t i = 0; i < count_; ++i) elements += kernel_rows_[i].rows * kernel_rows_[i].cols;
  const int64_t useful = std::min<int64_t>((elements + kWorthAThread - 1) / kWorthAThread, std::max(threads, 1));
  const auto workers = static_cast<size_t>(std::max<int64_t>(useful, 1));
  const int64_t task_elements = std::min(kTaskElements, elements / (4 * static_cast<int64_t>(workers)) + 1);
  tasks_.clear();
  for (const KernelRow* kernel_row = kernel_rows_; kernel_row < kernel_rows_ + count_; ++kernel_row) {
    const int64_t blocks =
        kernel_row->rows * ((kernel_row->cols + kernel_row->block_size - 1) / kernel_row->block_size);
    const int64_t blocks_per_task = std::max<int64_t>(1, task_elements / kernel_row->block_size);
    for (int64_t begin = 0; begin < blocks; begin += blocks_per_task) {
      tasks_.push_back({kernel_row, begin, std::min(begin + blocks_per_task, blocks)});
    }
  }
  shares_ = std::vector<Share>(workers);
  for (size_t w = 0; w < workers; ++w) {
    shares_[w].begin = tasks_.size() * w / workers;
    shares_[w].end = tasks_.size() * (w + 1) / workers;
  }
  threads_ = threads;
}

// A thread that is done with its own share goes on with other threads' shares.
void CpuStep::run_tasks(void* context, int worker) {
  Work& work = *static_cast<Work*>(context);
  const CpuStep& step = work.step;
  int64_t nonfinite = 0;
  for (size_t offset = 0; offset < step.shares_.size(); ++offset) {
    Share& share = work.step.shares_[(static_cast<size_t>(worker) + offset) % step.shares_.size()];
    for (size_t i; (i = share.next.fetch_add(1)) < share.end;) {
      if (i + kFetchedAhead < share.end) fetch(*step.tasks_[i + kFetchedAhead].kernel_row);
      const Task& task = step.tasks_[i];
      const CpuKernel kernel =
          step.target_->kernel_of(task.kernel_row->codec, work.call.groups[task.kernel_row->group].rule);
      nonfinite += kernel(work.call, *task.kernel_row, task.begin, task.end);
    }
  }
  work.nonfinite += nonfinite;
}

void CpuStep::prepare(int threads, const std::string& target) {
  if (target_ == nullptr || target != target_->name) target_ = &cpu_target(target);
  if (shares_.empty() || threads != threads_) deal_out(threads);
}

int64_t CpuStep::run(const GroupRow* groups, const float* const* tables, Phase phase) noexcept {
  for (Share& share : shares_) share.next = share.begin;
  Work work{*this, {kernel_rows_, groups, tables, phase}};
  run_on_threads(static_cast<int>(shares_.size()), run_tasks, &work);
  return work.nonfinite;
}

}  // namespace shardopt
