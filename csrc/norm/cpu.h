// Passes over gradients on the CPU.
#pragma once

#include <string>

#include "norm/norm.h"

namespace shardopt {

// On at most `threads` threads, with a target's kernels (cpu_targets()); the results depend on neither.
void norm_cpu(const NormCall& call, float factor, int threads, const std::string& target);

}  // namespace shardopt
