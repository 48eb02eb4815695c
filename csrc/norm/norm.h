// One pass over gradients: takes the squares or magnitudes for their norm, or multiplies them by a coefficient.
#pragma once

#include <string>

#include "core/call.h"

namespace shardopt {

enum class NormPass : int32_t {
  kSquares = 0,  // adds the squares to ExactSums
  kLargest = 1,  // raises int64s to the bits of the largest magnitude as a float32: NaN is above infinity
  kScale = 2,    // multiplies the gradients by a factor, rounding once
};

// Uses these columns of a kernel row: gradient and gradient_dtype; cols, the number of elements; sums, the address of
// the result, which kernel rows share.
struct NormCall {
  const KernelRow* kernel_rows;
  int64_t count;
  NormPass pass;
};

// Runs on at most `threads` threads, with a target's kernels (step/cpu_targets.h); the results depend on neither.
void norm_cpu(const NormCall& call, float factor, int threads, const std::string& target);

}  // namespace shardopt
