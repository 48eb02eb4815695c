// Messages on the CPU.
#pragma once

#include <string>

#include "comm/message.h"

namespace shardopt {

// On at most `threads` threads, with a target's kernels (cpu_targets()); the bytes depend on neither.
void encode_cpu(const EncodeCall& call, int threads, const std::string& target);
void sum_cpu(const SumCall& call, int threads, const std::string& target);

}  // namespace shardopt
