// Messages on a CUDA device. Not run on a GPU so far: compiled for sm_90, and its source run on the CPU by tests.
#pragma once

#include "comm/message.h"

namespace shardopt {

// Both functions only launch kernels, in the given stream of the current device, and throw std::runtime_error if the
// launch fails. The bytes equal the bytes of encode_cpu and sum_cpu. The layouts' parts lie on the device.
void encode_cuda(const EncodeCall& call, void* stream);
void sum_cuda(const SumCall& call, void* stream);

}  // namespace shardopt
