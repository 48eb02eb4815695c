// Launches the passes over gradients on CUDA.
#define SHARDOPT_TARGET cuda
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "norm/cuda_kernel.h"

namespace shardopt {
namespace {

void check_launch() {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string("a norm's kernel: ") + cudaGetErrorString(error));
}

}  // namespace

void norm_cuda(const NormCall& call, const NormTask* tasks, int64_t task_count, const float* factor, void* stream) {
  if (task_count == 0) return;
  constexpr int64_t kWarps = cuda::kNormThreads / cuda::kWarp;
  const auto blocks = static_cast<unsigned>((task_count + kWarps - 1) / kWarps);
  cuda::kernel_of(call.pass)<<<blocks, cuda::kNormThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      call.kernel_rows, tasks, task_count, factor);
  check_launch();
}

void clip_cuda(const int64_t* words, bool is_magnitude, float max_norm, float* clip, void* stream) {
  cuda::clip_by<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(words, is_magnitude, max_norm, clip);
  check_launch();
}

}  // namespace shardopt
