// The step on the CPU.
#pragma once

#include <string>
#include <vector>

#include "step/cpu_call.h"

namespace shardopt {

// The instruction sets that this machine runs, best first: "avx512", "avx2", "portable".
std::vector<std::string> cpu_targets();

// Steps all entries on `threads` threads and returns the number of elements that were skipped. The result does not
// depend on `threads` or `target`.
int64_t step_cpu(const CpuCall& call, int64_t entries, int threads, const std::string& target);

}  // namespace shardopt
