// Launches the step on CUDA.
//
// Compile with: nvcc -std=c++17 -O3 --fmad=false -gencode arch=compute_80,code=sm_80 -I csrc -c csrc/step/cuda.cu
#define SHARDOPT_TARGET cuda
#include <cuda_runtime.h>

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

void prepare_cuda(const CudaCall& call, void* stream) {
  cuda::prepare<<<1, cuda::kPrepareThreads, 0, static_cast<cudaStream_t>(stream)>>>(call);
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
  int current = 0;
  cuda::check(cudaGetDevice(&current), "cudaGetDevice");
  if (current == device) return;
  cuda::check(cudaSetDevice(device), "cudaSetDevice");
  saved_ = current;
}

CudaDeviceGuard::~CudaDeviceGuard() {
  if (saved_ >= 0) cudaSetDevice(saved_);
}

int cuda_device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace shardopt
