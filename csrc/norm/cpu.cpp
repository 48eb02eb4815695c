#include <algorithm>
#include <atomic>
#include <vector>

#include "core/exact_sum.h"
#include "norm/norm.h"
#include "step/cpu_targets.h"
#include "threads/pool.h"

namespace shardopt {
namespace {

constexpr int64_t kTask = 1 << 16;         // elements of a task
constexpr int64_t kWorthThread = 1 << 15;  // elements for which another thread is worth its start

struct Work {
  const NormCall& call;
  const float factor;
  const NormKernels kernels;
  std::vector<int64_t> ends;  // per kernel row, the number of tasks up to the row's last one
  std::atomic<int64_t> next{0};
};

// One thread's part of an exact sum.
class Gathered {
 public:
  ExactSum& at(uint64_t address) {
    if (address != address_) share();
    address_ = address;
    return sum_;
  }

  // Adds the thread's part to the sum, as other threads do.
  void share() {
    if (address_ == 0) return;
    generic::carry_once(sum_);
    const auto from = reinterpret_cast<const int64_t*>(&sum_);
    const auto to = reinterpret_cast<int64_t*>(address_);
    for (size_t i = 0; i < sizeof sum_ / sizeof *from; ++i) {
      if (from[i]) __atomic_fetch_add(to + i, from[i], __ATOMIC_RELAXED);
    }
    sum_ = {};
  }

 private:
  uint64_t address_ = 0;
  ExactSum sum_ = {};
};

void raise_to(int64_t* largest, int64_t value) {
  for (int64_t known = __atomic_load_n(largest, __ATOMIC_RELAXED); known < value;) {
    if (__atomic_compare_exchange_n(largest, &known, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return;
  }
}

void run_tasks(void* context, int) {
  Work& work = *static_cast<Work*>(context);
  const std::vector<int64_t>& ends = work.ends;
  Gathered gathered;
  for (int64_t next; (next = work.next.fetch_add(1)) < ends.back();) {
    // Gradients are multiplied from the last to the first: the norm's pass has left the last in the cache.
    const int64_t task = work.call.pass == NormPass::kScale ? ends.back() - 1 - next : next;
    const auto i = std::upper_bound(ends.begin(), ends.end(), task) - ends.begin();
    const KernelRow& kernel_row = work.call.kernel_rows[i];
    const auto dtype = static_cast<DType>(kernel_row.gradient_dtype);
    const int64_t begin = (task - (i == 0 ? 0 : ends[i - 1])) * kTask, n = std::min(kernel_row.cols - begin, kTask);
    char* const gradient = reinterpret_cast<char*>(kernel_row.gradient) + begin * (dtype == DType::kFloat32 ? 4 : 2);
    switch (work.call.pass) {
      case NormPass::kSquares:
        work.kernels.squares(gathered.at(kernel_row.sums), gradient, dtype, n);
        break;
      case NormPass::kLargest:
        raise_to(reinterpret_cast<int64_t*>(kernel_row.sums), work.kernels.largest(gradient, dtype, n));
        break;
      case NormPass::kScale:
        work.kernels.scale(gradient, dtype, n, work.factor);
    }
  }
  gathered.share();
}

}  // namespace

void norm_cpu(const NormCall& call, float factor, int threads, const std::string& target) {
  if (call.count == 0) return;
  Work work{call, factor, cpu_target(target).norm_kernels(), {}};
  int64_t tasks = 0, elements = 0;
  for (int64_t i = 0; i < call.count; ++i) {
    tasks += (call.kernel_rows[i].cols + kTask - 1) / kTask;
    elements += call.kernel_rows[i].cols;
    work.ends.push_back(tasks);
  }
  const int64_t worth = std::clamp<int64_t>(elements / kWorthThread, 1, threads);
  run_on_threads(static_cast<int>(worth), run_tasks, &work);
}

}  // namespace shardopt
