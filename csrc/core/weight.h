// How weights narrower than float32 are kept: the low bits of a master weight beside a 16-bit float, and stochastic
// rounding.
#pragma once

#include "core/call.h"
#include "core/dither.h"
#include "core/numeric.h"

SHARDOPT_BEGIN_NAMESPACE

// A master weight is a word of 32 bits. For bfloat16 the word is a float32; for float16 the word is a float16 with 16
// more bits of mantissa (5 bits of exponent, 26 of mantissa). The word's upper half is the parameter; the optimizer
// keeps the lower bits.

// A word rounded to 16 + kLowBits bits, to nearest even; lower bits are undefined.
template <int kLowBits, class I>
SHARDOPT_HD I rounded_word(I word) {
  const auto w = as_unsigned(word);
  return as_signed(kLowBits == 16 ? w : w + 0x7fu + ((w >> 8) & 1u));
}

// The largest finite word of 16 + kLowBits bits for a bfloat16 parameter.
template <int kLowBits>
constexpr int32_t kLargestWord = kInfinityBits - (1 << (16 - kLowBits));

// The master weight of a float, rounded to 16 + kLowBits bits, to nearest even; lower bits are undefined. Finite
// weights stay finite.
template <DType kDType, int kLowBits, class F>
SHARDOPT_HD IntOf<F> master_word(F x) {
  using I = IntOf<F>;
  constexpr int kDropped = 16 - kLowBits;
  const I b = magnitude_bits(x), sign = bits(x) & kSignMask;
  if constexpr (kDType == DType::kBFloat16) {
    constexpr int32_t kLargest = kLargestWord<kLowBits>;
    const I word = rounded_word<kLowBits>(bits(x));
    if (!any(b > kLargest)) return word;
    const I large = select(b < kInfinityBits, spread<I>(kLargest), b);
    const I tamed = select(b > kInfinityBits, spread<I>(0x7fc00000), large);
    return select(b > kLargest, tamed | sign, word);
  } else {
    // The largest below 65536 whose word is no infinity. From 65520 on the float16 is infinite, the master weight is
    // not.
    constexpr int32_t kLargest = kLowBits == 16 ? 0x477fffff : 0x477fffe0;
    const I normal = rounded_word<kLowBits>(moved_up(min_int(b, spread<I>(kLargest)) - (112 << 23), 3));
    // Below 2^-14 a float16 is a multiple of 2^-24; the remainder has kLowBits more bits.
    const F y = magnitude(x), shifted = y + 0.5f;
    // Unsigned, because larger numbers overflow here; `select` below drops their result.
    const F rounded = (y - (shifted - 0.5f)) * (16777216.0f * (1 << kLowBits)) + kWhole;
    const auto low = as_unsigned(bits(rounded)) + -static_cast<uint32_t>(kWholeBits);
    const auto units = as_unsigned(bits(shifted) - 0x3f000000) << 16;
    const I subnormal = as_signed(units + (low << kDropped));
    const I finite = select(b < 0x38800000, subnormal, normal);
    const I special = select(b > kInfinityBits, spread<I>(0x7e000000), spread<I>(0x7c000000));
    return select(b >= kInfinityBits, special, finite) | sign;
  }
}

// The float of a master weight: the inverse of master_word.
template <DType kDType, class I>
SHARDOPT_HD auto float_from_master_word(I word) {
  if constexpr (kDType == DType::kBFloat16) {
    return float_from_bits(word);
  } else {
    const I sign = word & kSignMask, rest = word & kMagnitudeMask;
    const I normal = (rest >> 3) + (112 << 23);
    const I special = (rest >> 3) | kInfinityBits;
    const I subnormal = bits(to_float(rest) * 9.094947017729282379150390625e-13f);  // 2^-40
    return float_from_bits(sign | select(rest >= 0x7c000000, special, select(rest < 0x04000000, subnormal, normal)));
  }
}

// A master weight in two words: the parameter's and, signed, kLowBits (8 or 16) more bits. Each word stands in the low
// bits of an integer; higher bits are undefined.
template <class I>
struct SplitWeight {
  I high, low;
};

// Splits a weight; the parameter is the nearest float of its dtype, away from zero in a tie.
template <DType kDType, int kLowBits, class F>
SHARDOPT_HD SplitWeight<IntOf<F>> split_weight(F x) {
  const IntOf<F> word = master_word<kDType, kLowBits>(x);
  return {(word + 0x8000) >> 16, word >> (16 - kLowBits)};
}

// Joins the words of a weight; `low` is a signed number.
template <DType kDType, int kLowBits, class I>
SHARDOPT_HD auto join_weight(I high, I low) {
  const I nearest = high << 16;
  const I joined = as_signed(as_unsigned(nearest) + as_unsigned(moved_up(low, 16 - kLowBits)));
  // If the sign changes, the parameter was set to zero from outside, and the low bits still belong to another weight.
  return float_from_master_word<kDType>(select((joined ^ nearest) < 0, nearest, joined));
}

// Random bits by counter. The bits depend on a parameter, a step and an element's index in the flattened global
// parameter (modulo 2^32) alone, so that any sharding and device draws alike. Mixes as lowbias32 does (C. Wellons,
// "Prospecting for Hash Functions"), with a key.
struct Noise {
  uint32_t first = 0, second = 0;

  Noise() = default;

  // `key`: made of the seed and the parameter. `element`: the index from which bits_at counts.
  SHARDOPT_HD Noise(uint64_t key, float step, int64_t element) {
    const uint64_t mixed = mix64(mix64(key) + static_cast<uint64_t>(step));
    first = static_cast<uint32_t>(mixed) + static_cast<uint32_t>(element);
    second = static_cast<uint32_t>(mixed >> 32);
  }

  // The bits of elements counted from another one.
  SHARDOPT_HD Noise from(int64_t element) const {
    Noise moved = *this;
    moved.first += static_cast<uint32_t>(element);
    return moved;
  }

  template <class I>
  SHARDOPT_HD I bits_at(I index) const {
    auto x = as_unsigned(index) + first;
    x = x ^ (x >> 16);
    x = x * 0x7feb352du;
    x = x ^ second;
    x = x ^ (x >> 15);
    x = x * 0x846ca68bu;
    x = x ^ (x >> 16);
    return as_signed(x);
  }
};

// The bfloat16 next below x in magnitude or next above; above with the probability that makes the mean exact.
template <class F>
SHARDOPT_HD IntOf<F> bf16_at_random(F x, IntOf<F> random) {
  const IntOf<F> b = bits(x);
  const IntOf<F> rounded = ((b >> 16) & 0xffff) + (((b & 0xffff) + (random & 0xffff)) >> 16);
  return select(magnitude_bits(x) >= kInfinityBits, bf16_from_float(x), rounded);
}

SHARDOPT_END_NAMESPACE
