// What every codec may use, and the concept.
//
// A codec is a struct with
//   kName, Code        its name and the type of one code
//   kRoot              whether unsigned moments are coded by their square root
//   kRelative          whether a signed moment with an unsigned one beside it is coded in units of the latter's coded
//   root Signed, Unsigned   a coder for each kind of moment:
//     kScales            float32 scales per block; 0: the codec has no blocks
//     measure(e, s)      the block's scales from its extremes
//     Coder(s, table)    the coder of a block with these scales
//     encode(x), decode(c)
// and knows nothing of rules. `table` is what shardopt/codec/<name>.py lays out; nullptr where a codec needs none.
#pragma once

#include "core/call.h"
#include "core/numeric.h"

SHARDOPT_BEGIN_NAMESPACE

// A signed code is a two's complement int8 in a uint8.
SHARDOPT_HD int32_t signed_code(uint8_t c) { return static_cast<int8_t>(c); }

SHARDOPT_HD int32_t absolute(int32_t q) { return q < 0 ? -q : q; }

SHARDOPT_HD uint8_t code_with_sign_of(int32_t q, float x) { return static_cast<uint8_t>(x < 0.0f ? -q : q); }

// The base of a coder that divides by the block's largest magnitude.
struct ScaledByMaximum {
  static constexpr int kScales = 1;

  float scale;
  float divisor;  // the scale, but 1 in a block of zeros

  SHARDOPT_HD static void measure(const Extremes& extremes, float* scales) {
    scales[0] = float_from_bits(extremes.high);
  }

  SHARDOPT_HD explicit ScaledByMaximum(const float* scales)
      : scale(scales[0]), divisor(scales[0] > 0.0f ? scales[0] : 1.0f) {}
};

SHARDOPT_END_NAMESPACE
