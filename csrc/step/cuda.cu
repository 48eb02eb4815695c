// Launches the step on CUDA; the kernels of usual rules.
//
// Compile with: nvcc -std=c++17 -O3 --fmad=false -gencode arch=compute_80,code=sm_80 -I csrc -c csrc/step/cuda.cu
#define SHARDOPT_TARGET cuda
#include <cuda_runtime.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "step/cuda_prepare.h"

namespace shardopt {
namespace cuda {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error, which the check of the next launch would report again
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Asks for as much of a multiprocessor's memory as it can share, once per kernel and device: CUDA's default may leave
// less than the kResident thread blocks need that its registers suffice for.
void prefer_shared_memory(const Kernel& kernel) {
  static std::mutex mutex;
  static std::set<std::pair<int, const void*>> asked;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const auto* const run = reinterpret_cast<const void*>(kernel.run);
  const std::lock_guard<std::mutex> lock(mutex);
  if (!asked.insert({device, run}).second) return;
  check(cudaFuncSetAttribute(run, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "the shared memory of the step's kernel");
}

}  // namespace
}  // namespace cuda

void prepare_cuda(const CudaCall& call, const uint64_t* gradients, void* stream) {
  const auto in = static_cast<cudaStream_t>(stream);
  const auto grid = [](int64_t threads) {
    return static_cast<unsigned>((threads + cuda::kPrepareThreads - 1) / cuda::kPrepareThreads);
  };
  if (call.row_count <= kLaunchedGradients && call.step_count <= kLaunchedGradients) {
    cuda::LaunchedGradients launched;
    std::copy_n(gradients, call.row_count, launched.address);
    cuda::prepare<<<1, cuda::kPrepareThreads, 0, in>>>(call, launched);
  } else {
    if (call.step_count > 0) cuda::count_steps<<<grid(call.step_count), cuda::kPrepareThreads, 0, in>>>(call);
    if (call.row_count > 0) cuda::prepare_rows<<<grid(call.row_count), cuda::kPrepareThreads, 0, in>>>(call, gradients);
  }
  cuda::check(cudaGetLastError(), "the kernel that prepares the step");
}

void step_cuda(const CudaCall& call, const CudaBatch& batch, void* stream) {
  constexpr int64_t kTasks = cuda::kThreads / cuda::kWarp;
  const auto grid = static_cast<unsigned>((batch.end - batch.begin + kTasks - 1) / kTasks);
  const int other = batch.rule - cuda::UsualRules::kCount, with_sums = other - cuda::OtherRules::kCount;
  const cuda::Kernel kernel = other < 0       ? cuda::kernel_of(batch, batch.rule, cuda::UsualRules{})
                              : with_sums < 0 ? cuda::other_kernel_of(batch, other)
                                              : cuda::sum_kernel_of(batch, with_sums);
  if (kernel.shared_bytes > 0) cuda::prefer_shared_memory(kernel);
  const auto in = static_cast<cudaStream_t>(stream);
  kernel.run<<<grid, cuda::kThreads, kernel.shared_bytes, in>>>(call, batch);
  cuda::check(cudaGetLastError(), "the step's kernel");
}

void copy_cuda(const uint64_t* to, const uint64_t* from, const int64_t* nbytes, int64_t count, void* stream) {
  for (int64_t i = 0; i < count; ++i)
    cuda::check(cudaMemcpyAsync(reinterpret_cast<void*>(to[i]), reinterpret_cast<const void*>(from[i]),
                                static_cast<size_t>(nbytes[i]), cudaMemcpyDefault, static_cast<cudaStream_t>(stream)),
                "a copy between host and device");
}

int pin_cuda(int device, uint64_t address, uint64_t nbytes) {
  const CudaDeviceGuard guard(device);
  const cudaError_t error = cudaHostRegister(reinterpret_cast<void*>(address), nbytes, cudaHostRegisterPortable);
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

void unpin_cuda(int device, uint64_t address) {
  const CudaDeviceGuard guard(device);
  if (cudaHostUnregister(reinterpret_cast<void*>(address)) != cudaSuccess) cudaGetLastError();
}

CudaDeviceGuard::CudaDeviceGuard(int device) {
  // Sets the device even if this runtime calls it current: PyTorch's own runtime may have made another context current.
  cuda::check(cudaGetDevice(&saved_), "cudaGetDevice");
  cuda::check(cudaSetDevice(device), "cudaSetDevice");
}

CudaDeviceGuard::~CudaDeviceGuard() { cudaSetDevice(saved_); }

int cuda_device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace shardopt
