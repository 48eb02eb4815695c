// Passes over gradients on the CPU: the driver, and the kernels of each instruction set.
#pragma once

#include <string>

#include "norm/norm.h"

namespace shardopt {

// Runs on at most `threads` threads, with a target's kernels (cpu_targets()); the results depend on neither.
void norm_cpu(const NormCall& call, float factor, int threads, const std::string& target);

// Gradients are n contiguous elements at any address.
struct NormKernels {
  void (*squares)(ExactSum& sum, const char* gradient, DType dtype, int64_t n);
  int32_t (*largest)(const char* gradient, DType dtype, int64_t n);
  void (*scale)(char* gradient, DType dtype, int64_t n, float factor);
};

}  // namespace shardopt
