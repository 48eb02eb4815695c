#include "comm/cpu.h"

#include <algorithm>
#include <atomic>

#include "step/cpu.h"
#include "threads/pool.h"

namespace shardopt {
namespace {

constexpr int64_t kTaskBlocks = 512;

MessageKernels kernels_of(const std::string& target) {
  check_target(target);
#if defined(__x86_64__)
  if (target == "avx512vbmi" || target == "avx512") return avx512::message_kernels();
  if (target == "avx2" && __builtin_cpu_supports("f16c")) return avx2::message_kernels();
#elif defined(__aarch64__)
  if (target == "neon") return neon::message_kernels();
#endif
  return portable::message_kernels();
}

template <class Call>
struct Work {
  const Call& call;
  void (*const kernel)(const Call&, int64_t, int64_t);
  const int64_t blocks;
  std::atomic<int64_t> next{0};
};

template <class Call>
void run_tasks(void* context, int) {
  Work<Call>& work = *static_cast<Work<Call>*>(context);
  for (int64_t begin; (begin = work.next.fetch_add(kTaskBlocks)) < work.blocks;) {
    work.kernel(work.call, begin, std::min(begin + kTaskBlocks, work.blocks));
  }
}

template <class Call>
void run(const Call& call, void (*kernel)(const Call&, int64_t, int64_t), int64_t blocks, int threads) {
  Work<Call> work{call, kernel, blocks};
  const int64_t tasks = (blocks + kTaskBlocks - 1) / kTaskBlocks;
  run_on_threads(static_cast<int>(std::clamp<int64_t>(threads, 1, std::max<int64_t>(tasks, 1))), run_tasks<Call>,
                 &work);
}

}  // namespace

void encode_cpu(const EncodeCall& call, int threads, const std::string& target) {
  run(call, kernels_of(target).encode[static_cast<int>(call.dtype)], call.chunks * call.layout.blocks, threads);
}

void sum_cpu(const SumCall& call, int threads, const std::string& target) {
  run(call, kernels_of(target).sum[static_cast<int>(call.raw)], call.layout.blocks, threads);
}

}  // namespace shardopt
