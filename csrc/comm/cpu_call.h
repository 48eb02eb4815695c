// Between the CPU driver of messages and the kernels of each instruction set.
#pragma once

#include "comm/message.h"

namespace shardopt {

// Codes or decodes blocks [begin, end) of a message, counted over its chunks.
using MessageKernel = void (*)(const MessageCall& call, int64_t begin, int64_t end);

struct MessageKernels {
  MessageKernel encode[3], decode[3];  // by DType
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
