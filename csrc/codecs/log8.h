// log8: a logarithmic code fitted to each block's range for the root of the second moment, and the first moment in
// units of that root, so that every element's update has the same small relative error.
#pragma once

#include "core/codec.h"

SHARDOPT_BEGIN_NAMESPACE

struct Log8 {
  static constexpr const char* kName = "log8";
  using Code = uint8_t;
  static constexpr int kCoderTable = 0;
  static constexpr bool kRoot = true;
  static constexpr bool kRelative = true;

  // Code q > 0 stands for the float whose bits lie (255 - q) steps below the bits of the block's maximum; code 0 for
  // zero.
  struct Unsigned : ScaledByRange<254, 32> {
    static constexpr int kShareBits = 15;

    int32_t top, step, base;  // base: the bits that a code of 0 would stand for
    float inverse_step;

    SHARDOPT_HD static bool is_even(const Extremes& extremes) {
      return extremes.high - (kInfinityBits - extremes.low) <= kMaxRange;
    }

    SHARDOPT_HD Unsigned(const float* scales, const float* table)
        : Unsigned(scales, table, reciprocal(inverted(scales))) {}
    SHARDOPT_HD Unsigned(const float* scales, const float*, float inverse)
        : top(bits(scales[0])),
          step(static_cast<int32_t>(scales[1])),
          base(opaque(top - 255 * step)),
          inverse_step(inverse) {}

    // The bits of 256 plus a code plus a random share of a step: floats from 256 to 512 have 15 bits after the point,
    // so that the code is the byte above these. The share is odd there: rounding does not move a whole number of steps.
    template <class Below, class I>
    SHARDOPT_HD I shared_code(Below below, I random) const {
      const I share = as_signed(as_unsigned(random) >> 17) | spread<I>(bits(511.0f) | 1);
      return bits(fma(below, spread<Below>(inverse_step), float_from_bits(share)));
    }

    // The code, with other bits above its byte, and what it decodes to.
    template <class I, class F>
    SHARDOPT_HD I code_of(I shared, int32_t at_zero, F& decoded) const {
      const I q = shared >> kShareBits;
      const auto steps = as_unsigned(step);
      const auto offset = as_unsigned(at_zero) - static_cast<uint32_t>(bits(256.0f) >> kShareBits) * steps;
      decoded = float_from_bits(as_signed(as_unsigned(q) * steps + as_unsigned(opaque(as_signed(offset)))));
      return q;
    }

    // One of the two codes around u, chosen at random.
    template <class F>
    SHARDOPT_HD IntOf<F> encode(F u, F& decoded, IntOf<F> random) const {
      using I = IntOf<F>;
      const F below = to_float(bits(u) - top);  // <= 0: as integers the bits are ordered alike
      const I q = code_of(max_int(shared_code(below, random), spread<I>(bits(257.0f))), base, decoded);
      const auto is_zero = bits(u) == 0;
      decoded = select(is_zero, F{}, decoded);
      return select(is_zero, I{}, q);
    }

    template <class F>
    SHARDOPT_HD IntOf<F> encode(F u, IntOf<F> random) const {
      F decoded;
      return encode(u, decoded, random);
    }

    template <class F>
    SHARDOPT_HD IntOf<F> encode_above_zero(F u, F& decoded, IntOf<F> random) const {
      return code_of(shared_code(to_float(bits(u) - top), random), base, decoded);
    }

    // A root of zero is as many steps below the maximum as its code says: clamped, the distance needs no other test.
    template <class F>
    SHARDOPT_HD IntOf<F> encode_even(F u, F& decoded, IntOf<F> random) const {
      const int32_t above_zero = max_int(top, 1 << 29);  // of a block of zeros, too
      const auto below = to_float(max_int(bits(u) - above_zero, -255 * step));
      return code_of(shared_code(below, random), above_zero - 255 * step, decoded);
    }

    template <class I>
    SHARDOPT_HD auto decode(I c) const {
      return float_from_bits(select(c == 0, I{}, c * step + base));
    }

    template <class I>
    SHARDOPT_HD auto decode_above_zero(I c) const {
      return float_from_bits(c * step + base);
    }
  };

  // Code q stands for T[|q|] with the sign of q, in units of the block's maximum; T inverts z = y (1.7 - 0.7 |y|).
  struct Signed : CodedByTable<true> {
    float inverse;

    SHARDOPT_HD Signed(const float* scales, const float* t) : Signed(scales, t, reciprocal(inverted(scales))) {}
    SHARDOPT_HD Signed(const float* scales, const float* t, float inverse_scale)
        : CodedByTable(scales, t), inverse(inverse_scale) {}

    template <class F>
    SHARDOPT_HD IntOf<F> encode(F r, IntOf<F>) const {
      const F y = r * inverse;
      return signed_code_of(y, fma(-0.7f * 127.0f, magnitude(y), 1.7f * 127.0f));
    }
  };
};

SHARDOPT_END_NAMESPACE
