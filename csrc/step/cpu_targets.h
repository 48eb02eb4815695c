// The kernels of each instruction set of the CPU, and those that this machine runs.
#pragma once

#include <string>
#include <vector>

#include "step/cpu_call.h"

namespace shardopt {

// cpu_kernel gives the kernel of a codec and a rule, by their places in the lists of step/instances.h.
#define SHARDOPT_DECLARE_KERNELS(target)     \
  namespace target {                         \
  CpuKernel cpu_kernel(int codec, int rule); \
  NormKernels norm_kernels();                \
  }
SHARDOPT_DECLARE_KERNELS(portable)
SHARDOPT_DECLARE_KERNELS(avx2)
SHARDOPT_DECLARE_KERNELS(avx512)
SHARDOPT_DECLARE_KERNELS(avx512vbmi)  // without norm_kernels: such processors run those of avx512
SHARDOPT_DECLARE_KERNELS(neon)

struct CpuTarget {
  std::string name;
  CpuKernel (*kernel_of)(int codec, int rule);
  NormKernels (*norm_kernels)();
};

// The instruction sets that this machine runs, best first: "avx512vbmi", "avx512", "avx2", "neon", "portable".
const std::vector<CpuTarget>& cpu_targets();

// Throws std::invalid_argument for a target that this machine does not run.
const CpuTarget& cpu_target(const std::string& name);

}  // namespace shardopt
