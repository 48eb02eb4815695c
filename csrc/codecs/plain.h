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
    SHARDOPT_HD static void measure(const Extremes&, float*) {}
    SHARDOPT_HD Signed(const float*, const float*) {}
    SHARDOPT_HD Code encode(float x) const { return x; }
    SHARDOPT_HD float decode(Code c) const { return c; }
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
    SHARDOPT_HD static void measure(const Extremes&, float*) {}
    SHARDOPT_HD Signed(const float*, const float*) {}
    SHARDOPT_HD Code encode(float x) const { return bf16_from_float(x); }
    SHARDOPT_HD float decode(Code c) const { return float_from_bf16(c); }
  };

  struct Unsigned : Signed {
    using Signed::Signed;
    SHARDOPT_HD Code encode(float v) const {
      const Code c = Signed::encode(v);
      return static_cast<Code>(c == 0 && v > 0.0f ? 1 : c);  // never rounded down to zero
    }
  };
};

SHARDOPT_END_NAMESPACE
