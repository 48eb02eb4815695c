// The CUDA part of shardopt._C for the CPU, for tests: the kernels' source, built by the host compiler.
#define SHARDOPT_TARGET emulated
#include <pybind11/pybind11.h>

#include <cstring>

#include "step/cuda_kernel.h"

namespace shardopt {

void prepare_cuda(const CudaCall& call, void*) {
  blockIdx.x = 0;
  emulation::run_block(emulated::kPrepareThreads, [&] { emulated::prepare(call); });
}

template <class... Rule>
void step_block(const CudaCall& call, const CudaBatch& batch, emulated::List<Rule...>) {
  int index = 0;
  ((batch.rule == index++ ? emulation::run_block(emulated::kThreads, [&] { emulated::step_tasks<Rule>(call, batch); })
                          : void()),
   ...);
}

void step_cuda(const CudaCall& call, const CudaBatch& batch, void*) {
  constexpr int64_t kTasks = emulated::kThreads / emulated::kWarp;
  blockIdx.x = 0;
  for (int64_t first = batch.begin; first < batch.end; first += kTasks, ++blockIdx.x) {
    step_block(call, batch, emulated::Rules{});
  }
}

void copy_cuda(const uint64_t* to, const uint64_t* from, const int64_t* nbytes, int64_t count, void*) {
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(reinterpret_cast<void*>(to[i]), reinterpret_cast<const void*>(from[i]), static_cast<size_t>(nbytes[i]));
}

CudaDeviceGuard::CudaDeviceGuard(int) {}
CudaDeviceGuard::~CudaDeviceGuard() {}

int cuda_device_count() { return 0; }

void bind_cuda(pybind11::module_& m);

}  // namespace shardopt

PYBIND11_MODULE(cuda_emulated, m) { shardopt::bind_cuda(m); }
