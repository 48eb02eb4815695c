// The interface between the CPU drivers and the kernels of each instruction set (step/cpu_targets.h).
#pragma once

#include "core/call.h"

namespace shardopt {

struct StepCall {
  const KernelRow* kernel_rows;
  const GroupRow* groups;
  const float* const* tables;  // per codec, nullptr where it needs none
  Phase phase;
};

// Steps blocks [begin, end) of a kernel row, counted along its rows. Returns the number of skipped elements.
using CpuKernel = int64_t (*)(const StepCall& call, const KernelRow& kernel_row, int64_t begin, int64_t end);

// The passes over gradients (norm/norm.h), of n contiguous elements at any address.
struct NormKernels {
  void (*squares)(ExactSum& sum, const char* gradient, DType dtype, int64_t n);
  int32_t (*largest)(const char* gradient, DType dtype, int64_t n);
  void (*scale)(char* gradient, DType dtype, int64_t n, float factor);
};

}  // namespace shardopt
