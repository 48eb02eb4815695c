// log4: both moments in one byte, a logarithmic code of 17 levels for the root of the second moment and one of 15 for
// the first in units of that root. Both are rounded at random, so that their means are exact.
#pragma once

#include "core/codec.h"

SHARDOPT_BEGIN_NAMESPACE

struct Log4 {
  static constexpr const char* kName = "log4";
  using Code = uint8_t;
  static constexpr int kCoderTable = 0;
  static constexpr bool kRoot = true;
  static constexpr bool kRelative = true;
  static constexpr bool kIsShared = true;
  static constexpr int kLevels = 17;     // levels of a root above zero
  static constexpr int kMagnitudes = 7;  // codes of a signed moment above zero

  // The byte of level q, 1 to kLevels, and the signed c, -kMagnitudes to kMagnitudes, is q + kLevels (c mod 15). Byte 0
  // stands for a zero root with a zero moment.
  template <class I>
  SHARDOPT_HD static I signed_part(I byte) {
    return (max_int(byte - 1, I{}) * 241) >> 12;  // / kLevels
  }

  // Level q stands for the float whose bits lie (kLevels - q) steps below the bits of the block's maximum.
  struct Unsigned : ScaledByRange<kLevels - 1, 8> {
    // base: the bits that a level of 0 would stand for; halfway: half a step above the maximum's bits.
    int32_t step, base, halfway;
    float inverse_step;

    SHARDOPT_HD Unsigned(const float* scales, const float* table)
        : Unsigned(scales, table, reciprocal(inverted(scales))) {}
    SHARDOPT_HD Unsigned(const float* scales, const float*, float inverse)
        : step(static_cast<int32_t>(scales[1])),
          base(opaque(bits(scales[0]) - kLevels * step)),
          halfway(bits(scales[0]) + step / 2),
          inverse_step(inverse) {}

    // One of the two levels around u, chosen at random so that the mean of the level's square is the square of u. Uses
    // the upper 16 bits of `random`.
    template <class F>
    SHARDOPT_HD IntOf<F> encode(F u, F& decoded, IntOf<F> random) const {
      using I = IntOf<F>;
      const F below = to_float(bits(u) - halfway);  // < 0: as integers the bits are ordered alike
      const I nearest = round_fma_to_int(below, inverse_step, kLevels);
      const I lower = min_int(max_int(nearest, spread<I>(1)), spread<I>(kLevels - 1));
      const I lower_bits = lower * step + base;
      const F low = float_from_bits(lower_bits), high = float_from_bits(lower_bits + step);
      const F share = to_float((random >> 16) & 0xffff) * (1.0f / 65536.0f);
      const auto goes_up = (u - low) * (u + low) > share * ((high - low) * (high + low));
      const auto is_zero = bits(u) == 0;
      decoded = select(is_zero, F{}, select(goes_up, high, low));
      return select(is_zero, I{}, select(goes_up, lower + 1, lower));
    }

    template <class I>
    SHARDOPT_HD auto decode(I byte) const {
      const I level = byte - kLevels * signed_part(byte);
      return float_from_bits(select(byte == 0, I{}, level * step + base));
    }
  };

  // c stands for T[|c|] with the sign of c, in units of the block's maximum; T inverts z = 2 y / (1 + |y|). The table
  // has c mod 15 in order, and one more value.
  struct Signed : ScaledByMaximum<> {
    static constexpr uint32_t kOther = 0x9e3779b9;

    const float* table;
    float inverse;

    SHARDOPT_HD Signed(const float* scales, const float* t) : Signed(scales, t, reciprocal(inverted(scales))) {}
    SHARDOPT_HD Signed(const float* scales, const float* t, float inverse_scale)
        : ScaledByMaximum(scales), table(t), inverse(inverse_scale) {}

    // One of the two codes around r, chosen at random so that the mean is r. Draws otherwise than the root.
    template <class F>
    SHARDOPT_HD IntOf<F> encode(F r, IntOf<F> random) const {
      using I = IntOf<F>;
      const F y = magnitude(r) * inverse;
      const I nearest = round_to_int(fma(y * (2.0f * kMagnitudes), reciprocal(y + 1.0f), spread<F>(-0.5f)));
      const I lower = min_int(max_int(nearest, I{}), spread<I>(kMagnitudes - 1));
      const F low = lookup<16>(table, lower), high = lookup<16>(table, lower + 1);
      const F share = to_float(as_signed((as_unsigned(random) * kOther) >> 16)) * (1.0f / 65536.0f);
      const I c = select(y - low > share * (high - low), lower + 1, lower);
      return select(bits(r) < 0, select(c == 0, I{}, 2 * kMagnitudes + 1 - c), c) * kLevels;
    }

    template <class I>
    SHARDOPT_HD auto decode(I byte) const {
      return lookup<16>(table, signed_part(byte)) * scale;
    }
  };
};

SHARDOPT_END_NAMESPACE
