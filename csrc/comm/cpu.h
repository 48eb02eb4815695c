// Messages on the CPU: the driver, and the kernels of each instruction set.
#pragma once

#include <string>

#include "comm/message.h"

namespace shardopt {

// Run on at most `threads` threads, with a target's kernels (cpu_targets()); the bytes depend on neither.
void encode_cpu(const EncodeCall& call, int threads, const std::string& target);
void sum_cpu(const SumCall& call, int threads, const std::string& target);

// EncodeKernel codes blocks [begin, end) of a message, counted over its chunks; SumKernel adds up blocks [begin, end)
// of a chunk.
using EncodeKernel = void (*)(const EncodeCall& call, int64_t begin, int64_t end);
using SumKernel = void (*)(const SumCall& call, int64_t begin, int64_t end);

struct MessageKernels {
  EncodeKernel encode[3];  // by DType
  SumKernel sum[3];        // by DType of parts that are not coded
};

namespace portable {
MessageKernels message_kernels();
}
#if defined(__x86_64__)
namespace avx2 {
MessageKernels message_kernels();
}
namespace avx512 {
MessageKernels message_kernels();
}
#elif defined(__aarch64__)
namespace neon {
MessageKernels message_kernels();
}
#endif

}  // namespace shardopt
