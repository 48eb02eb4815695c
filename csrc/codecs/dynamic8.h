// dynamic8: the dynamic map of "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), nearest value, ties
// to the lower code, with a floor under the second moment.
#pragma once

#include "core/codec.h"

SHARDOPT_BEGIN_NAMESPACE

// A map's nearest code without a search: the top 16 bits of a magnitude in [2^-23, 1] choose a bucket, and a bucket
// holds at most one boundary between two codes. Code = bucket's lowest code + (x > boundary).
struct DynamicBuckets {
  static constexpr int32_t kFirst = (127 - 23) << 7;
  static constexpr int32_t kCount = (127 << 7) - kFirst + 1;

  const float* boundary;
  const float* lowest;  // whole numbers

  // `side` 1 is the negative half of a signed map.
  SHARDOPT_HD int32_t nearest(float x, int32_t side) const {
    const int32_t bucket = min_int(max_int((magnitude_bits(x) >> 16) - kFirst, 0), kCount - 1) + side * kCount;
    return static_cast<int32_t>(lowest[bucket]) + (x > boundary[bucket] ? 1 : 0);
  }
};

struct Dynamic8 {
  static constexpr const char* kName = "dynamic8";
  using Code = uint8_t;
  static constexpr bool kRoot = false;
  static constexpr bool kRelative = false;

  // The table: signed map, its boundaries and lowest codes (positive half first), then the unsigned ones.
  static constexpr int kMap = 256;
  static constexpr int kSignedSize = kMap + 4 * DynamicBuckets::kCount;

  struct Unsigned : ScaledByMaximum {
    const float* map;

    SHARDOPT_HD Unsigned(const float* scales, const float* table) : ScaledByMaximum(scales), map(table + kSignedSize) {}

    SHARDOPT_HD Code encode(float v) const {
      const DynamicBuckets buckets{map + kMap, map + kMap + DynamicBuckets::kCount};
      return static_cast<Code>(max_int(buckets.nearest(v / divisor, 0), v > 0.0f ? 1 : 0));
    }

    SHARDOPT_HD float decode(Code c) const { return map[c] * scale; }
  };

  struct Signed : ScaledByMaximum {
    const float* map;

    SHARDOPT_HD Signed(const float* scales, const float* table) : ScaledByMaximum(scales), map(table) {}

    SHARDOPT_HD Code encode(float x) const {
      const DynamicBuckets buckets{map + kMap, map + kMap + 2 * DynamicBuckets::kCount};
      return static_cast<Code>(buckets.nearest(x / divisor, x < 0.0f ? 1 : 0));
    }

    SHARDOPT_HD float decode(Code c) const { return map[c] * scale; }
  };
};

SHARDOPT_END_NAMESPACE
