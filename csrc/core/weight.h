// How weights narrower than float32 are kept: the low bits of a master weight beside a bfloat16, and stochastic
// rounding.
#pragma once

#include "core/numeric.h"

SHARDOPT_BEGIN_NAMESPACE

// A weight in two words: the bfloat16 and, signed, kLowBits (8 or 16) more bits of the float32. Each in the low bits of
// an integer, whatever stands above.
template <class I>
struct SplitWeight {
  I high, low;
};

// Rounds to 16 + kLowBits bits, to nearest even, and splits: the bfloat16 is the nearest one, away from zero in a tie.
// With 16 bits nothing is lost; with 8 the error is at most 1/512 of a bfloat16's last place. Finite weights stay so.
template <int kLowBits, class F>
SHARDOPT_HD SplitWeight<IntOf<F>> split_weight(F x) {
  using I = IntOf<F>;
  // What would be rounded to infinity, less one last place of the word.
  constexpr int32_t kLargest = kInfinityBits - (1 << (16 - kLowBits));
  const auto b = as_unsigned(bits(x));
  const I word = as_signed(kLowBits == 16 ? b : b + 0x7fu + ((b >> 8) & 1u));
  if (any(magnitude_bits(x) > kLargest)) {
    const I sign = bits(x) & kSignMask;
    const I tamed = select(x != x, spread<I>(0x7fc00000),
                           select(magnitude_bits(x) < kInfinityBits, spread<I>(kLargest), magnitude_bits(x))) |
                    sign;
    const I all = select(magnitude_bits(x) > kLargest, tamed, word);
    return {(all + 0x8000) >> 16, all >> (16 - kLowBits)};
  }
  return {(word + 0x8000) >> 16, word >> (16 - kLowBits)};
}

// `low` as a signed number.
template <int kLowBits, class I>
SHARDOPT_HD auto join_weight(I high, I low) {
  const I nearest = high << 16, joined = nearest + (low << (16 - kLowBits));
  // Another sign: the bfloat16 was set to zero from outside, and the low bits are still those of another weight.
  return float_from_bits(select((joined ^ nearest) < 0, nearest, joined));
}

// Random bits by counter: of a parameter, a step and an element's index in the flattened global parameter (modulo
// 2^32), so that they do not depend on who asks. The mixing is that of lowbias32 (C. Wellons, "Prospecting for Hash
// Functions"), keyed.
struct Noise {
  uint32_t first = 0, second = 0;

  Noise() = default;

  // `key`: of the seed and the parameter. `element`: the index from which bits_at counts.
  SHARDOPT_HD Noise(uint64_t key, float step, int64_t element) {
    const uint64_t mixed = mix(mix(key) + static_cast<uint64_t>(step));
    first = static_cast<uint32_t>(mixed) + static_cast<uint32_t>(element);
    second = static_cast<uint32_t>(mixed >> 32);
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

 private:
  // The finalizer of splitmix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", 2014).
  SHARDOPT_HD static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
};

// The bfloat16 next below in magnitude or next above, above with the probability that makes the mean exact.
template <class F>
SHARDOPT_HD IntOf<F> bf16_at_random(F x, IntOf<F> random) {
  const IntOf<F> b = bits(x);
  const IntOf<F> rounded = ((b >> 16) & 0xffff) + (((b & 0xffff) + (random & 0xffff)) >> 16);
  return select(magnitude_bits(x) >= kInfinityBits, bf16_from_float(x), rounded);
}

SHARDOPT_END_NAMESPACE
