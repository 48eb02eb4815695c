// Arguments of the messages' calls from Python.
#pragma once

#include "comm/message.h"

namespace shardopt {

// Addresses become pointers. Throws std::invalid_argument if the chunks do not hold the elements.
MessageCall message_call(uint64_t floats, DType dtype, int64_t numel, uint64_t message, int64_t chunks,
                         int64_t chunk_numel, int64_t terms, float factor);

}  // namespace shardopt
