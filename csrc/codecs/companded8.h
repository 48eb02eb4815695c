// companded8: the codes of FlashOptim (arXiv 2602.23349) with float32 scales and a floor under the second moment.
#pragma once

#include "core/codec.h"

SHARDOPT_BEGIN_NAMESPACE

struct Companded8 {
  static constexpr const char* kName = "companded8";
  using Code = uint8_t;
  static constexpr int kCoderTable = 0;
  static constexpr bool kRoot = true;
  static constexpr bool kRelative = false;

  // The root, linear in units of the block's maximum, one of the two codes around it at random; above zero at least 1.
  struct Unsigned : ScaledByMaximum<kLeastRootScale> {
    float inverse255, unit;

    SHARDOPT_HD Unsigned(const float* scales, const float* table)
        : Unsigned(scales, table, reciprocal(inverted(scales))) {}
    SHARDOPT_HD Unsigned(const float* scales, const float*, float inverse)
        : ScaledByMaximum(scales), inverse255(255.0f * inverse), unit(scale * (1.0f / 255.0f)) {}

    template <class F>
    SHARDOPT_HD IntOf<F> encode(F u, IntOf<F> random) const {
      return select(bits(u) == 0, IntOf<F>{}, encode_above_zero(u, random));
    }

    template <class F>
    SHARDOPT_HD IntOf<F> encode_above_zero(F u, IntOf<F> random) const {
      return random_code_above_zero(fma(u, spread<F>(inverse255), random_base<F>(random)));
    }

    template <class I>
    SHARDOPT_HD auto decode(I c) const {
      return to_float(c) * unit;
    }

    template <class I>
    SHARDOPT_HD auto decode_above_zero(I c) const {
      return decode(c);
    }
  };

  // z = 2 y / (1 + |y|) of y in units of the block's maximum; the table holds the inverse.
  struct Signed : CodedByTable<true> {
    float inverse, inverse254;

    SHARDOPT_HD Signed(const float* scales, const float* t) : Signed(scales, t, reciprocal(inverted(scales))) {}
    SHARDOPT_HD Signed(const float* scales, const float* t, float inverse_scale)
        : CodedByTable(scales, t), inverse(inverse_scale), inverse254(254.0f * inverse_scale) {}

    template <class F>
    SHARDOPT_HD IntOf<F> encode(F x, IntOf<F>) const {
      return signed_code_of(x * inverse254, reciprocal(fma(magnitude(x), inverse, 1.0f)));
    }
  };
};

SHARDOPT_END_NAMESPACE
