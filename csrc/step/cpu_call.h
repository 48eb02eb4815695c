// The interface between the CPU driver and the kernels of each instruction set.
#pragma once

#include "core/call.h"

namespace shardopt {

struct StepCall {
  const KernelRow* kernel_rows;
  const GroupRow* groups;
  const float* const* tables;  // per codec, nullptr where it needs none
  Phase phase;
};

// Steps blocks [begin, end) of a kernel row, counted along its rows. Returns the number of elements whose gradient was
// not finite.
using CpuKernel = int64_t (*)(const StepCall& call, const KernelRow& kernel_row, int64_t begin, int64_t end);

// The kernel of a codec and a rule, by their places in the lists of step/instances.h.
namespace portable {
CpuKernel cpu_kernel(int codec, int rule);
}
#if defined(__x86_64__)
namespace avx2 {
CpuKernel cpu_kernel(int codec, int rule);
}
namespace avx512 {
CpuKernel cpu_kernel(int codec, int rule);
}
namespace avx512vbmi {
CpuKernel cpu_kernel(int codec, int rule);
}
#elif defined(__aarch64__)
namespace neon {
CpuKernel cpu_kernel(int codec, int rule);
}
#endif

}  // namespace shardopt
