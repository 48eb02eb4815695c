// dynamic8: the dynamic map of "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), nearest value, ties
// to the lower code, with a floor under the second moment.
#pragma once

#include "core/codec.h"

SHARDOPT_BEGIN_NAMESPACE

// A map of 256 rising values and its codes. The table: the values; the boundaries, of which `boundary[q]` is the
// largest float that is still nearest to value q (the last one infinite); and for each bucket of magnitudes the lowest
// code there. The top 16 bits of a magnitude in [2^-23, 1] choose its bucket, and no bucket holds two boundaries.
struct DynamicMap {
  static constexpr int32_t kValues = 256;
  static constexpr int32_t kFirstBucket = (127 - 23) << 7;
  static constexpr int32_t kBuckets = (127 << 7) - kFirstBucket + 1;
  static constexpr int kSignedSize = 2 * kValues + 2 * kBuckets;  // the buckets of positive, then of negative numbers

  const float* values;

  template <class F>
  SHARDOPT_HD IntOf<F> nearest(F x, IntOf<F> first_bucket) const {
    using I = IntOf<F>;
    const I magnitude = (magnitude_bits(x) >> 16) - kFirstBucket;
    const I bucket = first_bucket + min_int(max_int(magnitude, I{}), spread<I>(kBuckets - 1));
    const I lowest = round_to_int(lookup<kBuckets>(values + 2 * kValues, bucket));
    return lowest + select(x > lookup<kValues>(values + kValues, lowest), spread<I>(1), I{});
  }

  template <class I>
  SHARDOPT_HD auto value(I code) const {
    return lookup<kValues>(values, code);
  }
};

struct Dynamic8 {
  static constexpr const char* kName = "dynamic8";
  using Code = uint8_t;
  static constexpr bool kRoot = false;
  static constexpr bool kRelative = false;

  struct Unsigned : ScaledByMaximum {
    DynamicMap map;

    SHARDOPT_HD Unsigned(const float* scales, const float* table)
        : ScaledByMaximum(scales), map{table + DynamicMap::kSignedSize} {}

    template <class F>
    SHARDOPT_HD IntOf<F> encode(F v) const {
      using I = IntOf<F>;
      return max_int(map.nearest(v / divisor, I{}), select(v > 0.0f, spread<I>(1), I{}));
    }

    template <class I>
    SHARDOPT_HD auto decode(I c) const {
      return map.value(c) * scale;
    }
  };

  struct Signed : ScaledByMaximum {
    static constexpr int kZero = 127;

    DynamicMap map;

    SHARDOPT_HD Signed(const float* scales, const float* table) : ScaledByMaximum(scales), map{table} {}

    template <class F>
    SHARDOPT_HD IntOf<F> encode(F x) const {
      using I = IntOf<F>;
      return map.nearest(x / divisor, select(x < 0.0f, spread<I>(DynamicMap::kBuckets), I{}));
    }

    template <class I>
    SHARDOPT_HD auto decode(I c) const {
      return map.value(c) * scale;
    }
  };
};

SHARDOPT_END_NAMESPACE
