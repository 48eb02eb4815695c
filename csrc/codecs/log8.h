// log8: a logarithmic code fitted to each block's range for the root of the second moment, and the first moment in
// units of that root, so that every element's update has the same small relative error.
#pragma once

#include "core/codec.h"

SHARDOPT_BEGIN_NAMESPACE

struct Log8 {
  static constexpr const char* kName = "log8";
  using Code = uint8_t;
  static constexpr bool kRoot = true;
  static constexpr bool kRelative = true;

  // Code q > 0 stands for the float whose bits lie (255 - q) steps below those of the block's maximum; 0 for zero.
  struct Unsigned {
    static constexpr int kScales = 2;  // the maximum; the step, a whole number below 2^24
    static constexpr int32_t kLevels = 254;
    static constexpr int32_t kMaxRange = 32 << 23;

    int32_t top, step;
    float inverse_step;

    SHARDOPT_HD static void measure(const Extremes& extremes, float* scales) {
      const int32_t range = min_int(extremes.high - (kInfinityBits - extremes.low), kMaxRange);
      scales[0] = float_from_bits(extremes.high);
      scales[1] = static_cast<float>(max_int(1, (range + kLevels - 1) / kLevels));
    }

    SHARDOPT_HD Unsigned(const float* scales, const float*)
        : top(bits(scales[0])), step(static_cast<int32_t>(scales[1])), inverse_step(1.0f / scales[1]) {}

    template <class F>
    SHARDOPT_HD IntOf<F> encode(F u) const {
      const F distance = to_float(top - bits(u)) * inverse_step;
      const IntOf<F> q = 255 - round_to_int(select(distance < 254.0f, distance, spread<F>(254.0f)));
      return select(u > 0.0f, q, IntOf<F>{});
    }

    template <class I>
    SHARDOPT_HD auto decode(I c) const {
      const I b = max_int(top - (255 - c) * step, spread<I>(1));  // 1: the smallest subnormal, never zero
      return float_from_bits(select(c > 0, b, I{}));
    }
  };

  // Code q stands for T[|q|] with the sign of q, in units of the block's maximum; T inverts z = y (1.7 - 0.7 y).
  struct Signed : SignedByTable {
    using SignedByTable::SignedByTable;

    template <class F>
    SHARDOPT_HD IntOf<F> encode(F r) const {
      const F y = magnitude(r) / divisor;
      const F z = y * fma(-0.7f, y, 1.7f);
      return code_with_sign_of(round_to_int(127.0f * z), r);
    }
  };
};

SHARDOPT_END_NAMESPACE
