// The place of a block in memory, copies of blocks that are filled up to whole packs, and prefetches.
#pragma once

#include "step/cpu_memory.h"

SHARDOPT_BEGIN_NAMESPACE

// The distance of prefetches from a block, in elements: a page of floats.
constexpr int64_t kFetchedAhead = 1024;

// The place of a block: in the tensors, or in copies that are filled up to whole packs.
template <class Code, int kMoments>
struct Block {
  Weights weights;
  const char* gradient;
  Code* codes[kMoments + 1];  // per moment; all equal if moments share codes
  int64_t scale_index;
  uint32_t dither;  // the random bits of the first element
  int n;            // elements

  // A copy, member by member. A load of the whole would span several recent stores, for which the processor waits half
  // as long as a block takes.
  SHARDOPT_HD Block copy() const {
    Block block;
    block.weights = {weights.words, weights.low_bits, weights.noise};
    block.gradient = gradient;
#pragma GCC unroll 4
    for (int k = 0; k < kMoments; ++k) block.codes[k] = codes[k];
    block.scale_index = scale_index;
    block.dither = dither;
    block.n = n;
    return block;
  }
};

// Prefetches the cache lines of `bytes` bytes; addresses without memory do no harm. Always inline: GCC takes a function
// that only prefetches for one without effect, and drops calls of it.
SHARDOPT_HD void fetch_lines(const void* from, uint64_t bytes) {
  const auto address = reinterpret_cast<uint64_t>(from);
  for (uint64_t i = 0; i < bytes; i += 64) __builtin_prefetch(reinterpret_cast<const void*>(address + i));
}

// A copy of a block of up to kMost elements. kArrays: number of arrays of codes, 1 if moments share codes.
template <class Code, int kMoments, int kArrays, int kMost>
struct alignas(64) BlockCopy {
  char weights[4 * kMost], low_bits[2 * kMost], gradient[4 * kMost];
  Code codes[kArrays][kMost];

  // Copies a block and fills it up to `padded` elements, fewer than kStep more, with zeros. zero_codes: the moments'
  // codes of zero. Returns the place of the copy.
  template <int kStep, class Format>
  SHARDOPT_HD Block<Code, kMoments> take(const Block<Code, kMoments>& from, int padded, const Format& format,
                                         const Code* zero_codes) {
    const auto n = static_cast<uint64_t>(from.n), all = static_cast<uint64_t>(padded);
    const uint64_t low_bytes = low_bytes_of(format.weight());
    const auto fill = [&](char* to, const char* source, uint64_t bytes) {
      __builtin_memset(to + bytes * (all - kStep), 0, bytes * kStep);
      copy_bytes(to, source, bytes * n);
    };
    Block<Code, kMoments> block = from.copy();
    block.n = padded;
    fill(block.weights.words = weights, from.weights.words, bytes_of(format.weight()));
    if (low_bytes) fill(block.weights.low_bits = low_bits, from.weights.low_bits, low_bytes);
    fill(gradient, from.gradient, bytes_of(format.gradient()));
    block.gradient = gradient;
    for (int k = 0; k < kMoments; ++k) block.codes[k] = codes[kArrays == 1 ? 0 : k];
    for (int k = 0; k < kArrays; ++k) {
      for (uint64_t i = all - kStep; i < all; ++i) codes[k][i] = zero_codes[k];
      copy_bytes(codes[k], from.codes[k], sizeof(Code) * n);
    }
    return block;
  }

  template <class Format>
  SHARDOPT_HD void give_back(const Block<Code, kMoments>& to, const Format& format) const {
    const auto n = static_cast<uint64_t>(to.n);
    copy_bytes(to.weights.words, weights, bytes_of(format.weight()) * n);
    if (low_bytes_of(format.weight())) copy_bytes(to.weights.low_bits, low_bits, low_bytes_of(format.weight()) * n);
    for (int k = 0; k < kArrays; ++k) copy_bytes(to.codes[k], codes[k], sizeof(Code) * n);
  }
};

SHARDOPT_END_NAMESPACE
