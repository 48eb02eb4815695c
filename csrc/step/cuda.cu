// Launches the step on CUDA.
//
// Compile with: nvcc -std=c++17 -O3 --fmad=false -gencode arch=compute_80,code=sm_80 -I csrc -c csrc/step/cuda.cu
#define SHARDOPT_TARGET cuda
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "step/cuda_kernel.h"

namespace shardopt {
namespace cuda {
namespace {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

using Formats = std::make_integer_sequence<int, kAlignedFormatCount>;

unsigned grid_of(const CudaBatch& batch) {
  constexpr int64_t kTasks = kThreads / kWarp;
  return static_cast<unsigned>((batch.end - batch.begin + kTasks - 1) / kTasks);
}

template <class Rule>
void launch(const CudaCall& call, const CudaBatch& batch, cudaStream_t stream) {
  step_tasks<Rule><<<grid_of(batch), kThreads, 0, stream>>>(call, batch);
  check(cudaGetLastError(), "the step's kernel");
}

template <class Rule, class Codec, int kFormat>
void launch_aligned(const CudaCall& call, const CudaBatch& batch, cudaStream_t stream) {
  if constexpr (Rule::Kept::kCount > 0 && Codec::Signed::kScales > 0) {
    constexpr AlignedFormat kIts = kAlignedFormats[kFormat];
    step_aligned_tasks<Rule, Codec, kIts.weight, kIts.gradient><<<grid_of(batch), kThreads, 0, stream>>>(call, batch);
    check(cudaGetLastError(), "the kernel of aligned blocks");
  }
}

using Launch = void (*)(const CudaCall&, const CudaBatch&, cudaStream_t);

template <class Rule, class Codec, int... kFormat>
Launch launch_of_format(int format, std::integer_sequence<int, kFormat...>) {
  constexpr Launch launches[] = {launch_aligned<Rule, Codec, kFormat>...};
  return launches[format];
}

template <class Rule, class... Codec>
Launch launch_of_codec(const CudaBatch& batch, List<Codec...>) {
  if (batch.format < 0) return launch<Rule>;
  using OfFormat = Launch (*)(int, Formats);
  constexpr OfFormat of_format[] = {launch_of_format<Rule, Codec>...};
  return of_format[batch.codec](batch.format, Formats{});
}

template <class... Rule>
Launch launch_of(const CudaBatch& batch, List<Rule...>) {
  using OfCodec = Launch (*)(const CudaBatch&, Codecs);
  constexpr OfCodec of_codec[] = {launch_of_codec<Rule>...};
  return of_codec[batch.rule](batch, Codecs{});
}

}  // namespace
}  // namespace cuda

void prepare_cuda(const CudaCall& call, const uint64_t* gradients, void* stream) {
  const auto in = static_cast<cudaStream_t>(stream);
  const auto grid = [](int64_t threads) {
    return static_cast<unsigned>((threads + cuda::kPrepareThreads - 1) / cuda::kPrepareThreads);
  };
  if (call.entry_count <= kLaunchedGradients && call.step_count <= kLaunchedGradients) {
    cuda::LaunchedGradients launched;
    std::copy_n(gradients, call.entry_count, launched.address);
    cuda::prepare<<<1, cuda::kPrepareThreads, 0, in>>>(call, launched);
  } else {
    if (call.step_count > 0) cuda::count_steps<<<grid(call.step_count), cuda::kPrepareThreads, 0, in>>>(call);
    cuda::prepare_entries<<<grid(call.entry_count), cuda::kPrepareThreads, 0, in>>>(call, gradients);
  }
  cuda::check(cudaGetLastError(), "the kernel that prepares the step");
}

void step_cuda(const CudaCall& call, const CudaBatch& batch, void* stream) {
  cuda::launch_of(batch, cuda::Rules{})(call, batch, static_cast<cudaStream_t>(stream));
}

void copy_cuda(const uint64_t* to, const uint64_t* from, const int64_t* nbytes, int64_t count, void* stream) {
  for (int64_t i = 0; i < count; ++i)
    cuda::check(cudaMemcpyAsync(reinterpret_cast<void*>(to[i]), reinterpret_cast<const void*>(from[i]),
                                static_cast<size_t>(nbytes[i]), cudaMemcpyDefault, static_cast<cudaStream_t>(stream)),
                "a copy between host and device");
}

CudaDeviceGuard::CudaDeviceGuard(int device) {
  // Set it even where this runtime says that it is set: PyTorch's own runtime may have made another context current.
  cuda::check(cudaGetDevice(&saved_), "cudaGetDevice");
  cuda::check(cudaSetDevice(device), "cudaSetDevice");
}

CudaDeviceGuard::~CudaDeviceGuard() { cudaSetDevice(saved_); }

int cuda_device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace shardopt
