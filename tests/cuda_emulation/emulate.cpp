// The CUDA part of shardopt._C for the CPU, for tests: the kernels' source, built by the host compiler.
#define SHARDOPT_TARGET emulated
#include <pybind11/pybind11.h>

#include <cstring>
#include <utility>

#include "step/cuda_kernel.h"

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

using Kernel = void (*)(CudaCall, CudaBatch);
using Formats = std::make_integer_sequence<int, kAlignedFormatCount>;

template <class Rule, class Codec, int kFormat>
Kernel aligned_kernel() {
  if constexpr (Rule::Kept::kCount > 0 && Codec::Signed::kScales > 0) {
    constexpr AlignedFormat kIts = kAlignedFormats[kFormat];
    return emulated::step_aligned_tasks<Rule, Codec, kIts.weight, kIts.gradient>;
  } else {
    return nullptr;
  }
}

template <class Rule, class Codec, int... kFormat>
Kernel kernel_of_format(int format, std::integer_sequence<int, kFormat...>) {
  const Kernel kernels[] = {aligned_kernel<Rule, Codec, kFormat>()...};
  return kernels[format];
}

template <class Rule, class... Codec>
Kernel kernel_of_codec(const CudaBatch& batch, emulated::List<Codec...>) {
  if (batch.format < 0) return emulated::step_tasks<Rule>;
  const Kernel kernels[] = {kernel_of_format<Rule, Codec>(batch.format, Formats{})...};
  return kernels[batch.codec];
}

template <class... Rule>
Kernel kernel_of(const CudaBatch& batch, emulated::List<Rule...>) {
  const Kernel kernels[] = {kernel_of_codec<Rule>(batch, emulated::Codecs{})...};
  return kernels[batch.rule];
}

void step_cuda(const CudaCall& call, const CudaBatch& batch, void*) {
  constexpr int64_t kTasks = emulated::kThreads / emulated::kWarp;
  const Kernel kernel = kernel_of(batch, emulated::Rules{});
  blockIdx.x = 0;
  for (int64_t first = batch.begin; first < batch.end; first += kTasks, ++blockIdx.x)
    emulation::run_block(emulated::kThreads, [&] { kernel(call, batch); });
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

PYBIND11_MODULE(cuda_emulated, m) {
  shardopt::bind_cuda(m);
  m.def(
      "aligned_turns", [] { return emulation::agreements; },
      "How many turns were taken by the kernels of aligned blocks.");
}
