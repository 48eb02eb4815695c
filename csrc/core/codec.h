// Helpers for codecs, and what a codec declares.
//
// A codec is a struct with
//   kName, Code        its name and the type of one code
//   kCoderTable        floats of `table` that coders look up, except for the values of signed codes
//   kRoot              whether unsigned moments are coded by their square root
//   kRelative          whether signed moments are coded in units of the coded root of the unsigned one beside them
//   kIsShared          true, in a relative codec: a signed and an unsigned moment have one code together, the sum of
//                      what their coders encode; both coders decode that sum. A codec without kIsShared has a code
//                      for each moment
//   Signed, Unsigned   a coder for each kind of moment:
//     kZero              the code of zero in a signed moment (in an unsigned moment the code is 0)
//     kScales            float32 scales per block; 0: the codec has no blocks
//     kMeasuresSmallest  whether `measure` needs the smallest magnitude too (unsigned coders)
//     measure(e, s)      the block's scales from its extremes
//     inverted(s)        the scale whose reciprocal a coder needs, above zero
//     Coder(s, table, i) the coder of a block with these scales; i: the reciprocal of inverted(s), computed if omitted
//     encode(x, r)       an integer whose low bytes are the code (a Code that is float: the code); r: random bits of
//                        core/dither.h, which most coders ignore
//     decode(c)          the value of a code as an integer (a Code that is float: as the value itself)
//     encode(x, y, r)    unsigned coder of a relative codec: the code as an integer, and what it decodes to
//     decode_above_zero, encode_above_zero   cheaper, for codes and numbers that are not zero
//     is_even(e)         whether the cheaper two suffice for a block with extremes e, the smallest > 0
//     encode_even(x, y, r)   as encode(x, y, r) for zero, too, where they suffice for the others; cheaper. Beside the
//                        code of zero, y is any number above zero
// The last three are for unsigned coders of UsualCodecs only, encode_even for relative ones. A codec knows nothing of
// rules. `table` is what shardopt/codec/<name>.py lays out; nullptr where a codec needs none.
#pragma once

#include <type_traits>

#include "core/call.h"
#include "core/dither.h"
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

// The whole number nearest to the exact product x * y, below 2^22, ties to even, in the low byte as two's complement.
template <class F>
SHARDOPT_HD IntOf<F> signed_code_of(F x, F y) {
  return bits(fma(x, y, spread<F>(kWhole)));
}

// 256 plus a random share of a code. Added to a number of codes below 256, the sum has 15 bits after the point, and the
// code is the byte above these. Shares are at least two of these bits away from 0 and 1, so that rounding moves no
// whole number.
template <class F>
SHARDOPT_HD F random_base(IntOf<F> random) {
  const IntOf<F> share = as_signed(as_unsigned(random) >> 17) & 0x7ffc;
  return float_from_bits(share | spread<IntOf<F>>(bits(256.0f) | 2));
}

// The code in such a sum, with other bits above its byte.
template <class F>
SHARDOPT_HD IntOf<F> random_code_above_zero(F sum) {
  return max_int(bits(sum), spread<IntOf<F>>(bits(257.0f))) >> 15;
}

template <class Codec, class = void>
constexpr bool kSharesCodes = false;
template <class Codec>
constexpr bool kSharesCodes<Codec, std::void_t<decltype(Codec::kIsShared)>> = Codec::kIsShared;

// Exponents of the least scale of a block that is not all zeros. 254 times the reciprocal of 2^-120 is finite, and the
// smallest code stands for a number above zero. A root, whose smallest code above zero is 1/255, must have a square
// above zero, too.
constexpr int kLeastScale = -120, kLeastRootScale = -66;

// The base of a coder whose unit is the block's largest magnitude, but at least 2^kLeast.
template <int kLeast = kLeastScale>
struct ScaledByMaximum {
  static constexpr int kScales = 1;
  static constexpr int kZero = 0;
  static constexpr bool kMeasuresSmallest = false;

  float scale;

  SHARDOPT_HD static void measure(const Extremes& extremes, float* scales) {
    constexpr int32_t kLeastBits = (127 + kLeast) << 23;
    scales[0] = float_from_bits(extremes.high == 0 ? 0 : max_int(extremes.high, kLeastBits));
  }

  // A block of zeros may take any number.
  SHARDOPT_HD static float inverted(const float* scales) { return scales[0] > 0.0f ? scales[0] : 1.0f; }

  SHARDOPT_HD static bool is_even(const Extremes&) { return true; }

  SHARDOPT_HD explicit ScaledByMaximum(const float* scales) : scale(scales[0]) {}
};

// The base of a coder of roots. Codes are even steps of the roots' bits, from the block's maximum down to its smallest
// root above zero, over at most kOctaves.
template <int32_t kSteps, int32_t kOctaves>
struct ScaledByRange {
  static constexpr int kScales = 2;  // the maximum; the step, a whole number
  static constexpr bool kMeasuresSmallest = true;
  static constexpr int32_t kMaxRange = kOctaves << 23;

  SHARDOPT_HD static void measure(const Extremes& extremes, float* scales) {
    const int32_t range = min_int(extremes.high - (kInfinityBits - extremes.low), kMaxRange);
    scales[0] = float_from_bits(extremes.high);
    scales[1] = static_cast<float>(max_int(1, (range + kSteps - 1) / kSteps));
  }

  SHARDOPT_HD static float inverted(const float* scales) { return scales[1]; }
};

// The base of a coder by table: a code stands for its value in the table times the scale. The table has a value for
// each of 256 codes or, if kSignMagnitude, for each of 128 magnitudes of signed codes.
template <bool kSignMagnitude>
struct CodedByTable : ScaledByMaximum<> {
  static constexpr int kTable = kSignMagnitude ? 128 : 256;

  const float* table;

  // Where this coder's values stand in the codec's table.
  SHARDOPT_HD static const float* values_in(const float* t) { return t; }

  SHARDOPT_HD CodedByTable(const float* scales, const float* t) : ScaledByMaximum(scales), table(t) {}

  template <class I>
  SHARDOPT_HD static auto value(const float* table, I c) {
    if constexpr (kSignMagnitude) {
      const I q = signed_code(c);
      return with_sign_of(lookup<kTable>(table, code_magnitude(q)), q);
    } else {
      return lookup<kTable>(table, c);
    }
  }

  template <class I>
  SHARDOPT_HD auto decode(I c) const {
    return value(table, c) * scale;
  }
};

SHARDOPT_END_NAMESPACE
