// Arguments of one call of the step: plain data, filled in by shardopt/step/rows.py, groups.py and
// csrc/inputs.cpp.
#pragma once

#include <cstdint>

namespace shardopt {

constexpr int kMaxMoments = 4;
constexpr int kMaxHyper = 12;
constexpr int kMaxBlock = 4096;
constexpr int kMaxSums = 2;
constexpr int kSumDigits = 22;

// A sum over one parameter or over all parameters, in whole numbers that ranks can add up in any order
// (core/exact_sum.h).
struct ExactSum {
  int64_t digits[kSumDigits];  // 32 bits each, with room for carries
  int64_t lost;                // the sum of lost_by() over the terms that were NaN or Inf
};

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// How a parameter's weights are kept (core/weight.h). The first three are the dtypes of DType, by the same numbers.
enum class WeightFormat : int32_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kBFloat16Plus8 = 3,       // bfloat16, and 8 more bits in the optimizer's state: a master weight of 24 bits
  kBFloat16Plus16 = 4,      // bfloat16 and 16 more bits: all of float32
  kBFloat16Stochastic = 5,  // bfloat16, rounded up or down at random
  kFloat16Plus8 = 6,        // float16 and 8 more bits
  kFloat16Plus16 = 7,       // float16 and 16 more bits: all of float32 from 2^-17 to 65504
};

// Treatment of an element whose gradient is NaN or Inf, or overflows its moments.
enum class NonFinite : int32_t { kSkip = 0, kPropagate = 1 };

// A cut block is shared by several ranks: its extremes are exchanged between the phases.
enum class Phase : int32_t {
  kSums = -1,     // kernel rows with sums, before the step is counted: adds to the sums, changes nothing else
  kStep = 0,      // whole blocks: everything. Cut blocks: the first extremes
  kRelative = 1,  // cut blocks of a relative codec: the extremes of the signed moments in units of the coded root
  kFinish = 2,    // cut blocks: update, encode, store
};

// The extremes of a block: the largest magnitude's bits, and how far the bits of the smallest magnitude above zero lie
// below those of infinity (so that both are maxima, and 0 is neutral).
struct Extremes {
  int32_t high;
  int32_t low;
};

// A rectangle of one parameter's local shard: either whole blocks only, or (`cut`) one cut block per row. Pointers are
// addresses of the rectangle's first element, scale or extreme; moments in the order in which the rule declares them.
struct KernelRow {
  uint64_t param;
  uint64_t gradient;
  uint64_t step;      // the step count, a float32 scalar, already counted up
  uint64_t low_bits;  // int8 or int16 per element, if the weight format has low bits
  uint64_t codes[kMaxMoments];
  uint64_t scales[kMaxMoments];
  uint64_t extremes[kMaxMoments];  // cut blocks only
  uint64_t sums;                   // an ExactSum per sum of the rule, which other kernel rows share; or 0
  double numel;                    // elements of the whole parameter, if the row has sums
  int64_t rows;
  int64_t cols;
  int64_t row_stride;         // elements from row to row of param, gradient and codes
  int64_t scales_row_stride;  // blocks from row to row of scales and extremes
  int64_t first_element;      // index of the first element in the flattened global parameter
  int64_t global_row_numel;   // elements from row to row in the global parameter
  uint64_t noise_key;         // key of stochastic rounding, made of the seed and the parameter
  int32_t block_size;
  int32_t weight_format;
  int32_t gradient_dtype;
  int32_t codec;
  int32_t group;
  int32_t cut;
};

struct GroupRow {
  double hyper[kMaxHyper];  // in the order of the rule's kHyper; the first is the learning rate
  uint64_t lr;              // CUDA: address of a float32 scalar in the place of hyper[0], or 0
  float gradient_scale;     // factor of the gradient: sign of `maximize`, inverse of the loss scale
  int32_t rule;
  int32_t nonfinite;
};

}  // namespace shardopt
