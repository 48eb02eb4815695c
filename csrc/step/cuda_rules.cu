// The CUDA kernels of rules that have none of their own for usual blocks.
//
// Compile as step/cuda.cu.
#define SHARDOPT_TARGET cuda
#include "step/cuda_kernel.h"

namespace shardopt {
namespace cuda {

Kernel other_kernel_of(const CudaBatch& batch, int rule) { return kernel_of(batch, rule, OtherRules{}); }

}  // namespace cuda
}  // namespace shardopt
