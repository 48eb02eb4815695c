// dynamic8: the dynamic map of "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), with a floor under
// the second moment.
#pragma once

#include "core/codec.h"

SHARDOPT_BEGIN_NAMESPACE

// The magnitudes of the map, counted from zero: zero, seven decades of evenly spaced values, one. `position`
// interpolates between them.
struct DynamicMap {
  // The table has the codes' values. Then, for each of eight parts, which begin at zero and at each decade's first
  // value: the place where the next part begins; the slope and offset of the part's line; two thirds of the index of
  // its last value. Finally the slope and offset of the line between the last two values of all.
  static constexpr int kStarts = 256, kSlopes = kStarts + 8, kOffsets = kSlopes + 8, kKnees = kOffsets + 8,
                       kTop = kKnees + 8, kSize = kTop + 2;
  // A part begins every 3.32 octaves; a step of 3.1 finds the part or the one before it, between 2^-22 and 1.
  static constexpr int32_t kSmallest = (127 - 22) << 23;
  static constexpr float kPartsPerBit = 1.0f / (3.1f * 8388608.0f), kPartsBelow = 34.0f;

  // The index of y among the magnitudes, between two of them in proportion; y >= 0 is in units of the block's maximum.
  // Spaces grow fivefold from decade to decade, so that across the space between two decades the index grows by a third
  // of what the lower line says.
  template <class F>
  SHARDOPT_HD static F position(const float* table, F y) {
    using I = IntOf<F>;
    const F octaves = to_float(max_int(bits(y), spread<I>(kSmallest)));
    const I before = bits(fma(octaves, spread<F>(kPartsPerBit), spread<F>(kWhole - kPartsBelow)));
    const I part = select(y > lookup<8>(table + kStarts, before), before + 1, before);
    const F line = fma(y, lookup<8>(table + kSlopes, part), lookup<8>(table + kOffsets, part));
    const F beyond = fma(line, spread<F>(1.0f / 3.0f), lookup<8>(table + kKnees, part));
    const F top = fma(y, spread<F>(table[kTop]), spread<F>(table[kTop + 1]));  // below zero for most y
    return float_from_bits(max_int(min_int(bits(line), bits(beyond)), bits(top)));
  }
};

struct Dynamic8 {
  static constexpr const char* kName = "dynamic8";
  using Code = uint8_t;
  static constexpr int kCoderTable = 2 * DynamicMap::kSize;
  static constexpr bool kRoot = false;
  static constexpr bool kRelative = false;

  // The base of both coders, each of which has a map of its own.
  template <bool kUnsigned>
  struct Coder : CodedByTable<false> {
    float inverse;

    SHARDOPT_HD static const float* values_in(const float* table) {
      return kUnsigned ? table + DynamicMap::kSize : table;
    }
    SHARDOPT_HD Coder(const float* scales, const float* t) : Coder(scales, t, reciprocal(inverted(scales))) {}
    SHARDOPT_HD Coder(const float* scales, const float* t, float inverse_scale)
        : CodedByTable(scales, values_in(t)), inverse(inverse_scale) {}
  };

  // Code 127 is zero, codes above 127 are positive and codes below negative; nearest value.
  struct Signed : Coder<false> {
    static constexpr int kZero = 127;
    using Coder<false>::Coder;

    template <class F>
    SHARDOPT_HD IntOf<F> encode(F x, IntOf<F>) const {
      using I = IntOf<F>;
      const I index = round_to_int(DynamicMap::position(table, magnitude(x) * inverse)), sign = bits(x) >> 31;
      return max_int((index ^ sign) - sign, spread<I>(-127)) + 127;  // the map has 1 but not -1
    }
  };

  // Codes are magnitudes, one of the two around a number, chosen at random.
  struct Unsigned : Coder<true> {
    using Coder<true>::Coder;

    template <class F>
    SHARDOPT_HD IntOf<F> encode(F x, IntOf<F> random) const {
      return select(bits(x) == 0, IntOf<F>{}, encode_above_zero(x, random));
    }

    template <class F>
    SHARDOPT_HD IntOf<F> encode_above_zero(F x, IntOf<F> random) const {
      const auto y = min_int(bits(x * inverse), spread<IntOf<F>>(bits(1.0f)));  // a tiny inverse is rounded coarsely
      return random_code_above_zero(DynamicMap::position(table, float_from_bits(y)) + random_base<F>(random));
    }

    template <class I>
    SHARDOPT_HD auto decode_above_zero(I c) const {
      return decode(c);
    }
  };
};

SHARDOPT_END_NAMESPACE
