// The CUDA part of shardopt._C for the CPU, for tests: the kernels' source, built by the host compiler.
#define SHARDOPT_TARGET emulated
#include <pybind11/pybind11.h>

#include <cstring>

#include "comm/cuda.h"
#include "comm/cuda_kernel.h"
#include "step/cuda_prepare.h"

namespace shardopt {

void prepare_cuda(const CudaCall& call, const uint64_t* gradients, void*) {
  blockIdx.x = 0;
  if (call.entry_count <= kLaunchedGradients && call.step_count <= kLaunchedGradients) {
    emulated::LaunchedGradients launched;
    std::memcpy(launched.address, gradients, sizeof(uint64_t) * static_cast<size_t>(call.entry_count));
    emulation::run_block(emulated::kPrepareThreads, [&] { emulated::prepare(call, launched); });
    return;
  }
  const auto run = [](int64_t threads, const auto& kernel) {
    for (blockIdx.x = 0; blockIdx.x * int64_t{emulated::kPrepareThreads} < threads; ++blockIdx.x)
      emulation::run_block(emulated::kPrepareThreads, kernel);
  };
  run(call.step_count, [&] { emulated::count_steps(call); });
  run(call.entry_count, [&] { emulated::prepare_entries(call, gradients); });
}

void step_cuda(const CudaCall& call, const CudaBatch& batch, void*) {
  constexpr int64_t kTasks = emulated::kThreads / emulated::kWarp;
  const emulated::Kernel kernel = emulated::kernel_of(batch, batch.rule, emulated::Rules{});
  emulation::dynamic_shared = std::make_unique<uint4[]>(kernel.shared_bytes / sizeof(uint4));
  blockIdx.x = 0;
  for (int64_t first = batch.begin; first < batch.end; first += kTasks, ++blockIdx.x)
    emulation::run_block(emulated::kThreads, [&] { kernel.run(call, batch); });
}

void copy_cuda(const uint64_t* to, const uint64_t* from, const int64_t* nbytes, int64_t count, void*) {
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(reinterpret_cast<void*>(to[i]), reinterpret_cast<const void*>(from[i]), static_cast<size_t>(nbytes[i]));
}

namespace {

// Three thread blocks, so that each takes several turns of the kernel's loop.
void run_message(emulated::MessageBlocks kernel, const MessageCall& call) {
  constexpr unsigned kThreadBlocks = 3;
  for (blockIdx.x = 0; blockIdx.x < kThreadBlocks; ++blockIdx.x)
    emulation::run_block(emulated::kMessageThreads, [&] { kernel(call, kThreadBlocks); });
}

}  // namespace

void encode_cuda(const MessageCall& call, void*) { run_message(emulated::encode_of(call.dtype), call); }
void decode_cuda(const MessageCall& call, void*) { run_message(emulated::decode_of(call.dtype), call); }

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
