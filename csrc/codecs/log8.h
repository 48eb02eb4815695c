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
    static constexpr bool kMeasuresSmallest = true;
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
    SHARDOPT_HD IntOf<F> encode(F u, F& decoded) const {
      using I = IntOf<F>;
      const F distance = to_float(top - bits(u)) * inverse_step;  // >= 0: as integers the bits are ordered alike
      const I levels = round_to_int(float_from_bits(min_int(bits(distance), spread<I>(bits(254.0f)))));
      const auto is_zero = bits(u) == 0;
      decoded = float_from_bits(select(is_zero, I{}, top - levels * step));
      return select(is_zero, I{}, 255 - levels);
    }

    template <class F>
    SHARDOPT_HD IntOf<F> encode(F u) const {
      F decoded;
      return encode(u, decoded);
    }

    template <class I>
    SHARDOPT_HD auto decode(I c) const {
      return float_from_bits(select(c == 0, I{}, c * step + (top - 255 * step)));
    }
  };

  // Code q stands for T[|q|] with the sign of q, in units of the block's maximum; T inverts z = y (1.7 - 0.7 |y|).
  struct Signed : CodedByTable<true> {
    float inverse;

    SHARDOPT_HD Signed(const float* scales, const float* t) : CodedByTable(scales, t), inverse(units_in(1.0f)) {}

    template <class F>
    SHARDOPT_HD IntOf<F> encode(F r) const {
      const F y = r * inverse;
      return signed_code_of(y * fma(-0.7f * 127.0f, magnitude(y), 1.7f * 127.0f));
    }
  };
};

SHARDOPT_END_NAMESPACE
