// The place of a block in memory, as floats in whole packs where it is not so already.
#pragma once

#include "step/cpu_passes.h"

SHARDOPT_BEGIN_NAMESPACE

// A block of a kernel row.
template <class Code, int kMoments>
struct Block {
  Weights weights;
  const char* gradient;
  Code* codes[kMoments + 1];   // per moment; all equal if moments share codes
  int64_t index, scale_index;  // in the kernel row; in the scales of each moment
  uint32_t dither;             // the random bits of the first element
  int n;                       // elements
};

// Where a kernel reads and writes a block: in the tensors or, converted and filled up to whole packs, in copies.
template <class Code, int kMoments>
struct Place {
  float* weight;
  const float* gradient;
  Code* codes[kMoments + 1];
};

// Copies of blocks of up to kMost elements in all. kArrays: number of arrays of codes, 1 if moments share codes.
template <class Code, int kMoments, int kArrays, int kMost>
struct alignas(64) BlockCopies {
  float weights[kMost], gradient[kMost];
  Code codes[kArrays][kMost];

  // Finds or makes the place of a block, copies at element `begin`. padded: the block's elements and fewer than kStep
  // more, which are zero. zero_codes: the moments' codes of zero.
  template <int kStep>
  SHARDOPT_HD void take(Place<Code, kMoments>& place, const Block<Code, kMoments>& block, const Formats& formats,
                        int begin, int padded, const Code* zero_codes) {
    const bool is_whole = block.n == padded;
    const auto bytes = [&](auto size) { return size * static_cast<uint64_t>(block.n); };
    place.weight = reinterpret_cast<float*>(block.weights.words);
    place.gradient = reinterpret_cast<const float*>(block.gradient);
    for (int k = 0; k < kMoments; ++k) place.codes[k] = block.codes[k];
    if (!is_whole) {
      __builtin_memset(weights + begin + padded - kStep, 0, 4 * kStep);
      __builtin_memset(gradient + begin + padded - kStep, 0, 4 * kStep);
      for (int k = 0; k < kArrays; ++k) {
        for (int i = begin + padded - kStep; i < begin + padded; ++i) codes[k][i] = zero_codes[k];
        copy_bytes(codes[k] + begin, block.codes[k], bytes(sizeof(Code)));
      }
      for (int k = 0; k < kMoments; ++k) place.codes[k] = codes[kArrays == 1 ? 0 : k] + begin;
    }
    if (formats.weight != WeightFormat::kFloat32) {
      load_weights(place.weight = weights + begin, block.weights, formats.weight, block.n);
    } else if (!is_whole) {
      copy_bytes(place.weight = weights + begin, block.weights.words, bytes(sizeof(float)));
    }
    if (formats.gradient != DType::kFloat32) {
      load_gradient(gradient + begin, block.gradient, formats.gradient, block.n);
      place.gradient = gradient + begin;
    } else if (!is_whole) {
      copy_bytes(gradient + begin, block.gradient, bytes(sizeof(float)));
      place.gradient = gradient + begin;
    }
  }

  // Writes what was copied back to the block.
  SHARDOPT_HD void give_back(const Block<Code, kMoments>& block, const Formats& formats,
                             const Place<Code, kMoments>& place) const {
    if (formats.weight != WeightFormat::kFloat32) {
      store_weights(block.weights, place.weight, formats.weight, block.n);
    } else if (place.codes[0] != block.codes[0]) {
      copy_bytes(block.weights.words, place.weight, sizeof(float) * static_cast<uint64_t>(block.n));
    }
    for (int k = 0; k < kArrays && place.codes[0] != block.codes[0]; ++k) {
      copy_bytes(block.codes[k], place.codes[k], sizeof(Code) * static_cast<uint64_t>(block.n));
    }
  }
};

SHARDOPT_END_NAMESPACE
