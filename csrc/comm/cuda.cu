// Launches the kernels of messages on CUDA.
//
// Compile as step/cuda.cu.
#define SHARDOPT_TARGET cuda
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "comm/cuda.h"
#include "comm/cuda_kernel.h"

namespace shardopt {
namespace {

template <class Call>
void launch(void (*kernel)(const Call, int64_t), const Call& call, int64_t blocks, void* stream) {
  const int64_t thread_blocks = cuda::message_thread_blocks(blocks);
  kernel<<<static_cast<unsigned>(thread_blocks), cuda::kMessageThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      call, thread_blocks);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string("a message's kernel: ") + cudaGetErrorString(error));
}

}  // namespace

void encode_cuda(const EncodeCall& call, void* stream) {
  launch(cuda::encode_of(call.dtype), call, call.chunks * call.layout.blocks, stream);
}
void sum_cuda(const SumCall& call, void* stream) { launch(cuda::sum_of(call.raw), call, call.layout.blocks, stream); }

}  // namespace shardopt
