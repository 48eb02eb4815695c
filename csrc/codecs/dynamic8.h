// dynamic8: the dynamic map of "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), nearest value, ties
// toward zero, with a floor under the second moment.
#pragma once

#include "core/codec.h"

SHARDOPT_BEGIN_NAMESPACE

// The magnitudes of the map, counted from zero: zero, seven decades of evenly spaced values, one. An index is guessed
// from a straight line per decade, low by at most one, and settled by the edge between it and the next.
struct DynamicMap {
  // The table: the codes' values; per index the largest float that is still nearest to it; by binary exponent, from
  // 2^-31 to 1, where within it the next decade begins, and the decade before that; per decade the line.
  static constexpr int kEdges = 256, kStarts = kEdges + 256, kDecades = kStarts + 32, kSlopes = kDecades + 32,
                       kOffsets = kSlopes + 16, kSize = kOffsets + 16;
  static constexpr int32_t kSmallest = (127 - 31) << 23;

  // y >= 0, in units of the block's maximum.
  template <class F>
  SHARDOPT_HD static IntOf<F> guess(const float* table, F y) {
    using I = IntOf<F>;
    const I exponent = (max_int(bits(y), spread<I>(kSmallest)) >> 23) & 31;
    const I lower = bits(lookup<32>(table + kDecades, exponent));
    const I decade = select(y < lookup<32>(table + kStarts, exponent), lower, lower + 1);
    const F line = fma(y, lookup<16>(table + kSlopes, decade), lookup<16>(table + kOffsets, decade));
    return bits(line + kWhole) & 0xff;
  }

  template <class F>
  SHARDOPT_HD static IntOf<F> settle(F y, IntOf<F> guessed, F edge) {
    return select(y > edge, guessed + 1, guessed);
  }
};

struct Dynamic8 {
  static constexpr const char* kName = "dynamic8";
  using Code = uint8_t;
  static constexpr bool kRoot = false;
  static constexpr bool kRelative = false;

  // kUnsigned: all codes are magnitudes. Otherwise 127 is zero and the codes above and below it those of the signs.
  template <bool kUnsigned>
  struct Coder : CodedByTable<false> {
    static constexpr int kZero = 127;
    static constexpr bool kMeasuresSmallest = false;
    static constexpr int kEdges = kUnsigned ? 256 : 128;

    float inverse;

    SHARDOPT_HD static const float* entries(const float* table) {
      return kUnsigned ? table + DynamicMap::kSize : table;
    }
    SHARDOPT_HD static const float* edges(const float* table) { return entries(table) + DynamicMap::kEdges; }

    SHARDOPT_HD Coder(const float* scales, const float* t)
        : CodedByTable(scales, entries(t)), inverse(units_in(1.0f)) {}

    // `edge_of(guess)` looks up an edge.
    template <class F, class EdgeOf>
    SHARDOPT_HD IntOf<F> encode(F x, EdgeOf edge_of) const {
      using I = IntOf<F>;
      const F y = magnitude(x) * inverse;
      const I guessed = DynamicMap::guess(table, y);
      const I index = DynamicMap::settle(y, guessed, edge_of(guessed));
      if constexpr (kUnsigned) {
        return max_int(index, min_int(bits(x), spread<I>(1)));
      } else {
        const I sign = bits(x) >> 31;
        return max_int((index ^ sign) - sign, spread<I>(-127)) + 127;  // there is a 1 but no -1
      }
    }

    template <class F>
    SHARDOPT_HD IntOf<F> encode(F x) const {
      return encode(x, [&](IntOf<F> i) { return lookup<kEdges>(table + DynamicMap::kEdges, i); });
    }
  };

  using Signed = Coder<false>;
  using Unsigned = Coder<true>;
};

SHARDOPT_END_NAMESPACE
