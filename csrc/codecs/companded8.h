// companded8: the codes of FlashOptim (arXiv 2602.23349) with float32 scales and a floor under the second moment.
#pragma once

#include "core/codec.h"

SHARDOPT_BEGIN_NAMESPACE

struct Companded8 {
  static constexpr const char* kName = "companded8";
  using Code = uint8_t;
  static constexpr bool kRoot = true;
  static constexpr bool kRelative = false;

  // The root, linear in units of the block's maximum; above zero the code is at least 1.
  struct Unsigned : ScaledByMaximum {
    SHARDOPT_HD Unsigned(const float* scales, const float*) : ScaledByMaximum(scales) {}

    SHARDOPT_HD Code encode(float u) const {
      const int32_t q = round_to_int(255.0f * u / divisor);
      return static_cast<Code>(max_int(q, u > 0.0f ? 1 : 0));
    }

    SHARDOPT_HD float decode(Code c) const { return static_cast<float>(c) / 255.0f * scale; }
  };

  // z = 2 y / (1 + y) of the magnitude y in units of the block's maximum; the table holds the inverse.
  struct Signed : ScaledByMaximum {
    const float* table;

    SHARDOPT_HD Signed(const float* scales, const float* t) : ScaledByMaximum(scales), table(t) {}

    SHARDOPT_HD Code encode(float x) const {
      const float y = magnitude(x) / divisor;
      const float z = 2.0f * y / (1.0f + y);
      return code_with_sign_of(round_to_int(127.0f * z), x);
    }

    SHARDOPT_HD float decode(Code c) const {
      const int32_t q = signed_code(c);
      return with_sign_of(table[absolute(q)] * scale, q);
    }
  };
};

SHARDOPT_END_NAMESPACE
