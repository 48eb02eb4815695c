// The CUDA kernels of rules that need sums over the parameter.
//
// Compile as step/cuda.cu.
#define SHARDOPT_TARGET cuda
#include "step/cuda_kernel.h"

namespace shardopt {
namespace cuda {

Kernel sum_kernel_of(const CudaBatch& batch, int rule) { return kernel_of(batch, rule, SumRules{}); }

}  // namespace cuda
}  // namespace shardopt
