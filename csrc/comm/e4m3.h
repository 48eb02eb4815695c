// E4M3 codes and their scales (comm/message.h), for every device and instruction set.
#pragma once

#include "comm/message.h"
#include "core/numeric.h"

SHARDOPT_BEGIN_NAMESPACE

constexpr int32_t kNaNCode = 0x7f;
constexpr int32_t kLargestE4M3Bits = 0x43e00000;  // 448
// Blocks whose largest magnitude is at most this have a scale that leaves no element above 448.
constexpr int32_t kLargestScaledBits = 0x7f600000;  // 1.75 * 2^127

// The byte of a block's scale, from the bits of its largest magnitude.
SHARDOPT_HD int32_t scale_code(int32_t largest) {
  const int32_t exponent = static_cast<int32_t>((static_cast<uint32_t>(largest) + 0x1fffff) >> 23);
  return min_int(max_int(exponent - 8, 3), 246);  // 448 is 1.75 * 2^8
}

SHARDOPT_HD float scale_value(int32_t code) { return float_from_bits(code << 23); }

// 8 over the scale: as a float32, 8 times an E4M3 number has an exponent whose low bits are the exponent of the
// number's code.
SHARDOPT_HD float eight_scales(int32_t code) { return float_from_bits((257 - code) << 23); }

// The code of y / 8, |y| <= 8 * 448, in the low byte; higher bits are undefined.
template <class F>
SHARDOPT_HD IntOf<F> e4m3_from_eight(F y) {
  using I = IntOf<F>;
  // 2^20 times the power of two below |y|: there floats are spaced as E4M3 numbers are. Subnormals are spaced as
  // numbers from 2^-6 on.
  const I power = max_int(bits(y) & kInfinityBits, spread<I>(124 << 23)) + (20 << 23);
  const I rounded = bits(magnitude(y) + float_from_bits(power));  // mantissa 0 to 16
  const I code = (rounded >> 20) + rounded;
  return (code & 0x7f) | ((bits(y) >> 24) & 0x80);
}

// The code of any float: saturates; infinities and NaN become NaN.
SHARDOPT_HD int32_t e4m3_from_any(float x, float eight) {
  const float y = x * eight;
  const int32_t most = kLargestE4M3Bits + (3 << 23);
  const float within = float_from_bits(min_int(magnitude_bits(y), most) | (bits(y) & kSignMask));
  return magnitude_bits(x) >= kInfinityBits ? kNaNCode : e4m3_from_eight(within) & 0xff;
}

template <class I>
SHARDOPT_HD auto float_from_e4m3(I code) {
  using F = decltype(float_from_bits(code));
  const I low = code & 0x7f;
  const auto is_subnormal = low < 8;
  const I raised = (low << 20) + select(is_subnormal, spread<I>(121 << 23), spread<I>(120 << 23));
  const F value = float_from_bits(raised) - select(is_subnormal, spread<F>(0.015625f), spread<F>(0.0f));  // 2^-6
  const I b = select(low == kNaNCode, spread<I>(0x7fc00000), bits(value));
  return float_from_bits(b | ((code & 0x80) << 24));
}

SHARDOPT_END_NAMESPACE
