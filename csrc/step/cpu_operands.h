// The operands of a block: in the tensors, or copied to floats in whole packs.
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
struct BlockOperands {
  float* weight;
  const float* gradient;
  Code* codes[kMoments + 1];
};

// Copies of blocks of up to kMost elements in all. kArrays: number of arrays of codes, 1 if moments share codes.
template <class Code, int kMoments, int kArrays, int kMost>
struct alignas(64) BlockCopies {
  float weights[kMost], gradient[kMost];
  Code codes[kArrays][kMost];

  // Finds the operands of a block; copies begin at element `begin`. padded: the block's elements and fewer than kStep
  // more, which are zero. zero_codes: the moments' codes of zero.
  template <int kStep>
  SHARDOPT_HD void take(BlockOperands<Code, kMoments>& operands, const Block<Code, kMoments>& block,
                        const Formats& formats, int begin, int padded, const Code* zero_codes) {
    const bool is_whole = block.n == padded;
    const auto bytes = [&](auto size) { return size * static_cast<uint64_t>(block.n); };
    operands.weight = reinterpret_cast<float*>(block.weights.words);
    operands.gradient = reinterpret_cast<const float*>(block.gradient);
    for (int k = 0; k < kMoments; ++k) operands.codes[k] = block.codes[k];
    if (!is_whole) {
      __builtin_memset(weights + begin + padded - kStep, 0, 4 * kStep);
      __builtin_memset(gradient + begin + padded - kStep, 0, 4 * kStep);
      for (int k = 0; k < kArrays; ++k) {
        for (int i = begin + padded - kStep; i < begin + padded; ++i) codes[k][i] = zero_codes[k];
        copy_bytes(codes[k] + begin, block.codes[k], bytes(sizeof(Code)));
      }
      for (int k = 0; k < kMoments; ++k) operands.codes[k] = codes[kArrays == 1 ? 0 : k] + begin;
    }
    if (formats.weight != WeightFormat::kFloat32) {
      load_weights(operands.weight = weights + begin, block.weights, formats.weight, block.n);
    } else if (!is_whole) {
      copy_bytes(operands.weight = weights + begin, block.weights.words, bytes(sizeof(float)));
    }
    if (formats.gradient != DType::kFloat32) {
      load_gradient(gradient + begin, block.gradient, formats.gradient, block.n);
      operands.gradient = gradient + begin;
    } else if (!is_whole) {
      copy_bytes(gradient + begin, block.gradient, bytes(sizeof(float)));
      operands.gradient = gradient + begin;
    }
  }

  // Writes what was copied back to the block.
  SHARDOPT_HD void give_back(const Block<Code, kMoments>& block, const Formats& formats,
                             const BlockOperands<Code, kMoments>& operands) const {
    if (formats.weight != WeightFormat::kFloat32) {
      store_weights(block.weights, operands.weight, formats.weight, block.n);
    } else if (operands.codes[0] != block.codes[0]) {
      copy_bytes(block.weights.words, operands.weight, sizeof(float) * static_cast<uint64_t>(block.n));
    }
    for (int k = 0; k < kArrays && operands.codes[0] != block.codes[0]; ++k) {
      copy_bytes(block.codes[k], operands.codes[k], sizeof(Code) * static_cast<uint64_t>(block.n));
    }
  }
};

SHARDOPT_END_NAMESPACE
