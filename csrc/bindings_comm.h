// Arguments of the messages' calls from Python.
#pragma once

#include <stdexcept>
#include <string>

#include "comm/message.h"

namespace shardopt {

// Addresses become pointers. Throws std::invalid_argument if the chunks do not hold the elements.
inline MessageCall message_call(uint64_t floats, DType dtype, int64_t numel, uint64_t message, int64_t chunks,
                                int64_t chunk_numel, int64_t terms, float factor) {
  if (chunks < 1 || chunk_numel < 1 || terms < 1 || numel < 0 || numel > chunks * chunk_numel) {
    throw std::invalid_argument("got " + std::to_string(numel) + " elements in " + std::to_string(chunks) +
                                " chunks of " + std::to_string(chunk_numel) + " and " + std::to_string(terms) +
                                " terms, expected chunks that hold the elements, and a term");
  }
  return {reinterpret_cast<void*>(floats),
          reinterpret_cast<uint8_t*>(message),
          numel,
          chunks,
          chunk_numel,
          terms,
          factor,
          dtype};
}

}  // namespace shardopt
