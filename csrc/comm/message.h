// Gradients as bytes: a message has chunks of equal size, one for or from each rank, and a chunk has E4M3 codes, a byte
// per element, and behind them a scale per block of 128 elements, a byte too.
//
// A scale is the biased exponent of a power of two (E8M0 of OCP MX), the smallest that leaves no finite element of the
// block above 448, within 2^-124 (whose smallest code is the smallest bfloat16) and 2^119. A code is the nearest E4M3
// number (E4M3FN: 4 bits of exponent, 3 of mantissa, no infinity) to the element over the scale, ties to even, at most
// 448. NaN and infinities become NaN (0x7f), and have no part in the scale. Powers of two scale exactly: only the code
// rounds.
#pragma once

#include <cstdint>

#include "core/call.h"
#include "core/target.h"

namespace shardopt {

constexpr int kMessageBlock = 128;
constexpr int kMessageAlignment = 16;  // of a chunk's codes, of its scales and of the chunk, in bytes

// Floats, and the messages that they are coded into or decoded from. A chunk holds chunk_numel elements, the last
// chunks fewer where the tensor ends before. A tensor is coded into `chunks` chunks; when decoding, each of its chunks
// is the sum of `terms` successive ones of the message, in this order, times `factor`.
struct MessageCall {
  void* floats;
  uint8_t* message;
  int64_t numel;  // of the tensor
  int64_t chunks;
  int64_t chunk_numel;
  int64_t terms;
  float factor;
  DType dtype;
};

}  // namespace shardopt

SHARDOPT_BEGIN_NAMESPACE

SHARDOPT_HD constexpr int64_t aligned_bytes(int64_t bytes) {
  return (bytes + kMessageAlignment - 1) / kMessageAlignment * kMessageAlignment;
}
SHARDOPT_HD constexpr int64_t message_blocks(int64_t numel) { return (numel + kMessageBlock - 1) / kMessageBlock; }

// Bytes of a chunk of so many elements.
SHARDOPT_HD constexpr int64_t chunk_bytes(int64_t numel) {
  return aligned_bytes(numel) + aligned_bytes(message_blocks(numel));
}

SHARDOPT_END_NAMESPACE
