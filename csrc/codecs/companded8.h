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

    template <class F>
    SHARDOPT_HD IntOf<F> encode(F u) const {
      const IntOf<F> q = round_to_int(255.0f * u / divisor);
      return max_int(q, select(u > 0.0f, spread<IntOf<F>>(1), IntOf<F>{}));
    }

    template <class I>
    SHARDOPT_HD auto decode(I c) const {
      return to_float(c) / 255.0f * scale;
    }
  };

  // z = 2 y / (1 + y) of the magnitude y in units of the block's maximum; the table holds the inverse.
  struct Signed : SignedByTable {
    using SignedByTable::SignedByTable;

    template <class F>
    SHARDOPT_HD IntOf<F> encode(F x) const {
      const F y = magnitude(x) / divisor;
      const F z = 2.0f * y / (1.0f + y);
      return code_with_sign_of(round_to_int(127.0f * z), x);
    }
  };
};

SHARDOPT_END_NAMESPACE
