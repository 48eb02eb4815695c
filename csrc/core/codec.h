// What every codec may use, and the concept.
//
// A codec is a struct with
//   kName, Code        its name and the type of one code
//   kRoot              whether unsigned moments are coded by their square root
//   kRelative          whether a signed moment with an unsigned one beside it is coded in units of the latter's coded
//   root Signed, Unsigned   a coder for each kind of moment:
//     kZero              the code of zero, in a signed moment (in an unsigned one it is 0)
//     kScales            float32 scales per block; 0: the codec has no blocks
//     measure(e, s)      the block's scales from its extremes
//     Coder(s, table)    the coder of a block with these scales
//     encode(x), decode(c)
//                        a code as an integer (a Code that is float: as the value itself)
// and knows nothing of rules. `table` is what shardopt/codec/<name>.py lays out; nullptr where a codec needs none.
#pragma once

#include "core/call.h"
#include "core/numeric.h"

SHARDOPT_BEGIN_NAMESPACE

// A signed code is a two's complement int8 in a uint8.
template <class I>
SHARDOPT_HD I signed_code(I c) {
  return (c ^ 0x80) - 0x80;
}

// |q|, at most 127: an index into a table of 128.
template <class I>
SHARDOPT_HD I code_magnitude(I q) {
  return min_int(select(q < 0, -q, q), spread<I>(127));
}

// The whole number q >= 0 with the sign of x, as a uint8.
template <class F>
SHARDOPT_HD IntOf<F> code_with_sign_of(IntOf<F> q, F x) {
  return select(x < 0.0f, -q, q) & 0xff;
}

// The base of a coder that divides by the block's largest magnitude.
struct ScaledByMaximum {
  static constexpr int kScales = 1;
  static constexpr int kZero = 0;

  float scale;
  float divisor;  // the scale, but 1 in a block of zeros

  SHARDOPT_HD static void measure(const Extremes& extremes, float* scales) {
    scales[0] = float_from_bits(extremes.high);
  }

  SHARDOPT_HD explicit ScaledByMaximum(const float* scales)
      : scale(scales[0]), divisor(scales[0] > 0.0f ? scales[0] : 1.0f) {}
};

// The base of a coder of signed magnitudes: code q stands for table[|q|] with the sign of q, times the scale.
struct SignedByTable : ScaledByMaximum {
  const float* table;

  SHARDOPT_HD SignedByTable(const float* scales, const float* t) : ScaledByMaximum(scales), table(t) {}

  template <class I>
  SHARDOPT_HD auto decode(I c) const {
    const I q = signed_code(c);
    return with_sign_of(lookup<128>(table, code_magnitude(q)) * scale, q);
  }
};

SHARDOPT_END_NAMESPACE
