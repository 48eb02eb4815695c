// companded16: companded8 with 16-bit codes, for moments that 8 bits cannot hold, such as very slow averages.
#pragma once

#include "core/codec.h"

SHARDOPT_BEGIN_NAMESPACE

struct Companded16 {
  static constexpr const char* kName = "companded16";
  using Code = uint16_t;
  static constexpr int kCoderTable = 0;
  static constexpr bool kRoot = true;
  static constexpr bool kRelative = false;

  // The root, linear in units of the block's maximum; above zero the code is at least 1, whose square is not zero.
  struct Unsigned : ScaledByMaximum<-58> {
    float inverse65535, unit;

    SHARDOPT_HD Unsigned(const float* scales, const float*)
        : ScaledByMaximum(scales),
          inverse65535(65535.0f * reciprocal(inverted(scales))),
          unit(scale * (1.0f / 65535.0f)) {}

    template <class F>
    SHARDOPT_HD IntOf<F> encode(F u, IntOf<F>) const {
      const IntOf<F> q = round_fma_to_int(u, inverse65535, 0.0f);
      return max_int(q, select(u > 0.0f, spread<IntOf<F>>(1), IntOf<F>{}));
    }

    template <class I>
    SHARDOPT_HD auto decode(I c) const {
      return to_float(c) * unit;
    }
  };

  // z = 2 y / (1 + |y|) of y in units of the block's maximum; a code q stands for y = q / (2 * 32767 - |q|).
  struct Signed : ScaledByMaximum<> {
    float inverse;

    SHARDOPT_HD Signed(const float* scales, const float*)
        : ScaledByMaximum(scales), inverse(reciprocal(inverted(scales))) {}

    template <class F>
    SHARDOPT_HD IntOf<F> encode(F x, IntOf<F>) const {
      const F y = x * inverse;
      return signed_code_of(65534.0f * y, reciprocal(magnitude(y) + 1.0f));
    }

    template <class I>
    SHARDOPT_HD auto decode(I c) const {
      const auto q = to_float(max_int((c ^ 0x8000) - 0x8000, spread<I>(-32767)));
      return q * reciprocal(65534.0f - magnitude(q)) * scale;
    }
  };
};

SHARDOPT_END_NAMESPACE
