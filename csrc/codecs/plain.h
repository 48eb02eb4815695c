// fp32 and bf16: moments stored as floats, without blocks. fp32 is the exact 32-bit optimizer.
#pragma once

#include "core/codec.h"

SHARDOPT_BEGIN_NAMESPACE

struct Float32 {
  static constexpr const char* kName = "fp32";
  using Code = float;
  static constexpr bool kRoot = false;
  static constexpr bool kRelative = false;

  struct Signed {
    static constexpr int kScales = 0;
    static constexpr int kZero = 0;
    static constexpr bool kMeasuresSmallest = false;
    SHARDOPT_HD static void measure(const Extremes&, float*) {}
    SHARDOPT_HD Signed(const float*, const float*) {}
    template <class F>
    SHARDOPT_HD F encode(F x, IntOf<F>) const {
      return x;
    }
    template <class F>
    SHARDOPT_HD F decode(F c) const {
      return c;
    }
  };
  using Unsigned = Signed;
};

struct BFloat16 {
  static constexpr const char* kName = "bf16";
  using Code = uint16_t;
  static constexpr bool kRoot = false;
  static constexpr bool kRelative = false;

  struct Signed {
    static constexpr int kScales = 0;
    static constexpr int kZero = 0;
    static constexpr bool kMeasuresSmallest = false;
    SHARDOPT_HD static void measure(const Extremes&, float*) {}
    SHARDOPT_HD Signed(const float*, const float*) {}
    template <class F>
    SHARDOPT_HD IntOf<F> encode(F x, IntOf<F>) const {
      return bf16_from_float(x);
    }
    template <class I>
    SHARDOPT_HD auto decode(I c) const {
      return float_from_bf16(c);
    }
  };

  struct Unsigned : Signed {
    using Signed::Signed;
    // The bfloat16 next below or above, chosen so that the mean is v >= 0, by the upper 16 bits of `random`.
    template <class F>
    SHARDOPT_HD IntOf<F> encode(F v, IntOf<F> random) const {
      using I = IntOf<F>;
      const I c = as_signed((as_unsigned(bits(v)) + (as_unsigned(random) >> 16)) >> 16);
      // A NaN may carry into the sign. A number above zero is never rounded down to zero.
      return max_int(min_int(c, spread<I>(0x7fff)), select(v > 0.0f, spread<I>(1), I{}));
    }
  };
};

SHARDOPT_END_NAMESPACE
