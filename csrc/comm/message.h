// Gradients on the wire, and their sums. A message has chunks of equal size, one for or from each rank; a chunk has the
// parts of several parameters. A part is coded or has plain floats. A coded part has rows one after another: E4M3
// codes, a byte per element, followed by a scale per block of 128 elements, a byte too.
//
// A scale is the biased exponent of a power of two (E8M0 of OCP MX), the smallest that leaves no finite element of the
// block above 448, within 2^-124 (whose smallest code is the smallest bfloat16) and 2^119. A code is the nearest E4M3
// number (E4M3FN: 4 bits of exponent, 3 of mantissa, no infinity) to the element over the scale, ties to even, at most
// 448. NaN and infinities become NaN (0x7f) and do not count for the scale. Powers of two scale exactly: only the code
// rounds.
#pragma once

#include <cstdint>

#include "core/call.h"
#include "core/target.h"

namespace shardopt {

constexpr int kMessageBlock = 128;
constexpr int kMessageAlignment = 16;  // in bytes: of a row, of its codes and of its scales
constexpr int kMostSums = 32;          // enough for 2^31 terms

// Rows of a parameter in a chunk. A part that is not coded is one row.
struct MessagePart {
  int64_t first_block;  // number of blocks in earlier parts
  int64_t element;      // index of the first element in the chunk
  int64_t byte;         // offset of the first element in the chunk's message
  int64_t row_numel;
  int64_t is_coded;
};

struct MessageLayout {
  const MessagePart* parts;
  int64_t count;
  int64_t blocks;  // blocks of a chunk, in all parts
  int64_t numel;   // elements of a chunk
  int64_t bytes;   // bytes of a chunk's message
};

// Chunks of floats to code. Parts that are not coded become float32.
struct EncodeCall {
  MessageLayout layout;
  const void* floats;
  uint8_t* message;
  int64_t chunks;
  DType dtype;  // the floats'
};

// A message's chunks are numbered terms, which are added pairwise: two sums of 2^k terms, the first of which begins at
// a multiple of 2^(k+1), become one of 2^(k+1). Sums are float32, as many elements as a chunk has.
struct SumCall {
  MessageLayout layout;
  const uint8_t* message;
  int64_t terms;
  int64_t first;               // number of the first term
  int64_t begin;               // no sum has a term before this number
  int32_t taken, left;         // number of sums before and after the terms are added
  const float* in[kMostSums];  // the sums before, oldest first; null for zeros
  float* out[kMostSums];       // the sums afterwards; may be the memory of `in`
  void* mean;                  // if not null, receives the sum of all over `divisor`, and `out` is not written
  float divisor;
  DType dtype;  // the mean's
  DType raw;    // that of parts which are not coded
};

}  // namespace shardopt

SHARDOPT_BEGIN_NAMESPACE

SHARDOPT_HD constexpr int64_t aligned_bytes(int64_t bytes) {
  return (bytes + kMessageAlignment - 1) / kMessageAlignment * kMessageAlignment;
}
SHARDOPT_HD constexpr int64_t message_blocks(int64_t numel) { return (numel + kMessageBlock - 1) / kMessageBlock; }

// Bytes of a coded row of so many elements.
SHARDOPT_HD constexpr int64_t row_bytes(int64_t numel) {
  return aligned_bytes(numel) + aligned_bytes(message_blocks(numel));
}

// The place of a block in a chunk and in the chunk's message.
struct BlockPlace {
  int64_t element;     // index of the block's first element in the chunk
  int64_t byte;        // offset of the block's first code or float in the message
  int64_t scale_byte;  // only if the block is coded
  int64_t n;           // elements
  int64_t filling;     // zero bytes after the block's scale: the row's padding after its last scale, else 0
  bool is_coded;
};

// The part that has a block: the last part that begins at or before the block, of parts that are not empty.
SHARDOPT_HD int64_t part_of(const MessageLayout& layout, int64_t block) {
  int64_t low = 0, high = layout.count;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (layout.parts[middle].first_block <= block ? low : high) = middle;
  }
  return low;
}

SHARDOPT_HD BlockPlace block_place(const MessagePart& part, int64_t block, int64_t raw_bytes) {
  const int64_t per_row = message_blocks(part.row_numel), in_part = block - part.first_block;
  const int64_t row = part.is_coded ? in_part / per_row : 0, in_row = in_part - row * per_row,
                before = in_row * kMessageBlock;
  const int64_t left = part.row_numel - before;
  BlockPlace place;
  place.element = part.element + row * part.row_numel + before;
  place.n = left < kMessageBlock ? left : kMessageBlock;
  place.is_coded = part.is_coded != 0;
  place.filling = in_row == per_row - 1 ? aligned_bytes(per_row) - per_row : 0;
  const int64_t row_byte = part.byte + row * row_bytes(part.row_numel);
  place.byte = place.is_coded ? row_byte + before : part.byte + before * raw_bytes;
  place.scale_byte = row_byte + aligned_bytes(part.row_numel) + in_row;
  return place;
}

// The number of sums that end right before a numbered term and are added up with that term.
SHARDOPT_HD int sums_before(int64_t number, int64_t begin) {
  int count = 0;
  while ((number >> count) & 1 && ((number >> count) - 1) << count >= begin) ++count;
  return count;
}

// Adds terms to the sums of some lanes' elements. load(from) gives floats of a sum, term(t) floats of a term; store(to,
// x) and mean(x) write the results.
template <class F, class Load, class Term, class Store, class Mean>
SHARDOPT_HD void add_terms(const SumCall& call, F* sums, Load load, Term term, Store store, Mean mean) {
  int depth = 0;
  for (; depth < call.taken; ++depth) sums[depth] = call.in[depth] ? load(call.in[depth]) : F(0.0f);
  for (int64_t t = 0; t < call.terms; ++t) {
    F x = term(t);
    int before = sums_before(call.first + t, call.begin);
    if (before == 0 && !((call.first + t) & 1) && t + 1 < call.terms) {
      ++t;
      x = x + term(t);
      before = sums_before(call.first + t, call.begin) - 1;
    }
    for (; before > 0; --before) x = sums[--depth] + x;
    sums[depth++] = x;
  }
  if (call.mean) {
    F x = sums[--depth];
    while (depth > 0) x = sums[--depth] + x;
    mean(x / F(call.divisor) + F(0.0f));  // -0 becomes +0
    return;
  }
  for (int i = 0; i < call.left; ++i) store(call.out[i], sums[i]);
}

SHARDOPT_END_NAMESPACE
