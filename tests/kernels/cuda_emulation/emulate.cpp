// The CUDA part of shardopt._C for the CPU, for tests: the kernels' source, built by the host compiler.
#define SHARDOPT_TARGET emulated
#include <pybind11/pybind11.h>

#include <cstring>
#include <stdexcept>

#include "norm/cuda_kernel.h"
#include "step/cuda_prepare.h"

namespace shardopt {
namespace {

// Runs a grid of thread blocks. CUDA refuses one of none.
template <class F>
void run_grid(int64_t blocks, unsigned threads, const F& kernel) {
  if (blocks == 0) throw std::runtime_error("got a grid of 0 thread blocks, expected 1 or more");
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) emulation::run_block(threads, kernel);
}

int64_t blocks_of(int64_t count, int64_t each) { return (count + each - 1) / each; }

}  // namespace

void prepare_cuda(const CudaCall& call, const uint64_t* gradients, void*) {
  constexpr unsigned kThreads = emulated::kPrepareThreads;
  if (call.row_count <= kLaunchedGradients && call.step_count <= kLaunchedGradients) {
    emulated::LaunchedGradients launched;
    std::memcpy(launched.address, gradients, sizeof(uint64_t) * static_cast<size_t>(call.row_count));
    return run_grid(1, kThreads, [&] { emulated::prepare(call, launched); });
  }
  if (call.step_count > 0)
    run_grid(blocks_of(call.step_count, kThreads), kThreads, [&] { emulated::count_steps(call); });
  if (call.row_count > 0)
    run_grid(blocks_of(call.row_count, kThreads), kThreads, [&] { emulated::prepare_rows(call, gradients); });
}

void step_cuda(const CudaCall& call, const CudaBatch& batch, void*) {
  constexpr int64_t kTasks = emulated::kThreads / emulated::kWarp;
  const emulated::Kernel kernel = emulated::kernel_of(batch, batch.rule, emulated::Rules{});
  emulation::dynamic_shared = std::make_unique<uint4[]>(kernel.shared_bytes / sizeof(uint4));
  run_grid(blocks_of(batch.end - batch.begin, kTasks), emulated::kThreads, [&] { kernel.run(call, batch); });
}

void copy_cuda(const uint64_t* to, const uint64_t* from, const int64_t* nbytes, int64_t count, void*) {
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(reinterpret_cast<void*>(to[i]), reinterpret_cast<const void*>(from[i]), static_cast<size_t>(nbytes[i]));
}

void norm_cuda(const NormCall& call, const NormTask* tasks, int64_t task_count, const float* factor, void*) {
  constexpr unsigned kThreads = emulated::kNormThreads;
  const emulated::NormKernel kernel = emulated::kernel_of(call.pass);
  if (task_count == 0) return;
  run_grid(blocks_of(task_count, kThreads / emulated::kWarp), kThreads,
           [&] { kernel(call.kernel_rows, tasks, task_count, factor); });
}
void clip_cuda(const int64_t* words, bool is_magnitude, float max_norm, float* clip, void*) {
  run_grid(1, 1, [&] { emulated::clip_by(words, is_magnitude, max_norm, clip); });
}

int pin_cuda(uint64_t, uint64_t) { return 0; }
void unpin_cuda(uint64_t) {}

CudaDeviceGuard::CudaDeviceGuard(int) {}
CudaDeviceGuard::~CudaDeviceGuard() {}

int cuda_device_count() { return 0; }

void bind_cuda(pybind11::module_& m);

}  // namespace shardopt

PYBIND11_MODULE(cuda_emulated, m) {
  shardopt::bind_cuda(m);
  m.def(
      "quick_turns", [] { return emulation::agreements; },
      "How many turns were taken by the kernels of usual blocks, aligned or staged.");
}
