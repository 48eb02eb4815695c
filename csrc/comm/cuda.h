// Messages on a CUDA device. Not run on a GPU so far: compiled for sm_90, and its source run on the CPU by tests.
#pragma once

#include "comm/message.h"

namespace shardopt {

// Both only launch, in the given stream of the current device, and throw std::runtime_error if that fails. The bytes
// are those of encode_cpu and decode_cpu.
void encode_cuda(const MessageCall& call, void* stream);
void decode_cuda(const MessageCall& call, void* stream);

}  // namespace shardopt
