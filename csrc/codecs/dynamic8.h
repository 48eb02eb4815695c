// dynamic8: the dynamic map of "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), nearest value, with a
// floor under the second moment.
#pragma once

#include "core/codec.h"

SHARDOPT_BEGIN_NAMESPACE

// The magnitudes of the map, counted from zero: zero, seven decades of evenly spaced values, one. Each of these nine
// parts has a straight line, which rounded gives the index of the nearest magnitude, and a last index.
struct DynamicMap {
  // The table has the codes' values; for each binary exponent from 2^-31 to 1 the place where the next part begins, and
  // the part before that place; for each part the line's slope and offset, and the last index.
  static constexpr int kStarts = 256, kParts = kStarts + 32, kSlopes = kParts + 32, kOffsets = kSlopes + 16,
                       kLasts = kOffsets + 16, kSize = kLasts + 16;
  static constexpr int32_t kSmallest = (127 - 31) << 23;

  // The index of the magnitude nearest to y >= 0, which is in units of the block's maximum.
  template <class F>
  SHARDOPT_HD static IntOf<F> nearest(const float* table, F y) {
    using I = IntOf<F>;
    const I exponent = (max_int(bits(y), spread<I>(kSmallest)) >> 23) & 31;
    const I before = bits(lookup<32>(table + kParts, exponent));
    const I part = select(y > lookup<32>(table + kStarts, exponent), before + 1, before);
    const F line = fma(y, lookup<16>(table + kSlopes, part), lookup<16>(table + kOffsets, part));
    return min_int(round_to_int(line), bits(lookup<16>(table + kLasts, part)));
  }
};

struct Dynamic8 {
  static constexpr const char* kName = "dynamic8";
  using Code = uint8_t;
  static constexpr int kCoderTable = 2 * DynamicMap::kSize;
  static constexpr bool kRoot = false;
  static constexpr bool kRelative = false;

  // kUnsigned: all codes are magnitudes. Otherwise code 127 is zero, codes above 127 are positive and codes below
  // negative.
  template <bool kUnsigned>
  struct Coder : CodedByTable<false> {
    static constexpr int kZero = 127;
    static constexpr bool kMeasuresSmallest = false;
    float inverse;

    SHARDOPT_HD static const float* values_in(const float* table) {
      return kUnsigned ? table + DynamicMap::kSize : table;
    }
    SHARDOPT_HD Coder(const float* scales, const float* t) : Coder(scales, t, reciprocal(inverted(scales))) {}
    SHARDOPT_HD Coder(const float* scales, const float* t, float inverse_scale)
        : CodedByTable(scales, values_in(t)), inverse(inverse_scale) {}

    template <class F>
    SHARDOPT_HD IntOf<F> encode(F x, IntOf<F>) const {
      using I = IntOf<F>;
      const I index = DynamicMap::nearest(table, magnitude(x) * inverse);
      if constexpr (kUnsigned) {
        return max_int(index, min_int(bits(x), spread<I>(1)));
      } else {
        const I sign = bits(x) >> 31;
        return max_int((index ^ sign) - sign, spread<I>(-127)) + 127;  // the map has 1 but not -1
      }
    }
  };

  using Signed = Coder<false>;

  struct Unsigned : Coder<true> {
    using Coder<true>::Coder;

    template <class F>
    SHARDOPT_HD IntOf<F> encode_above_zero(F x, IntOf<F>) const {
      return max_int(DynamicMap::nearest(table, x * inverse), spread<IntOf<F>>(1));
    }

    template <class I>
    SHARDOPT_HD auto decode_above_zero(I c) const {
      return decode(c);
    }
  };
};

SHARDOPT_END_NAMESPACE
