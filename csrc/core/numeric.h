// IEEE float32 building blocks whose results are the same bits on every device and instruction set.
//
// Compiled without contraction (-ffp-contract=off, --fmad=false): a fused multiply-add happens only where `fma` is
// written. The rounding mode is to nearest even and subnormals are kept.
#pragma once

#include "core/target.h"

#if !defined(__CUDACC__)
#include <cstring>
#endif

SHARDOPT_BEGIN_NAMESPACE

constexpr int32_t kInfinityBits = 0x7f800000;
constexpr int32_t kMagnitudeMask = 0x7fffffff;

SHARDOPT_HD int32_t bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_int(x);
#else
  int32_t b;
  __builtin_memcpy(&b, &x, sizeof b);
  return b;
#endif
}

SHARDOPT_HD float float_from_bits(int32_t b) {
#if defined(__CUDA_ARCH__)
  return __int_as_float(b);
#else
  float x;
  __builtin_memcpy(&x, &b, sizeof x);
  return x;
#endif
}

SHARDOPT_HD int32_t magnitude_bits(float x) { return bits(x) & kMagnitudeMask; }

SHARDOPT_HD float magnitude(float x) { return float_from_bits(magnitude_bits(x)); }

SHARDOPT_HD bool is_finite(float x) { return magnitude_bits(x) < kInfinityBits; }

SHARDOPT_HD float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

SHARDOPT_HD float square_root(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

SHARDOPT_HD int32_t max_int(int32_t a, int32_t b) { return a > b ? a : b; }
SHARDOPT_HD int32_t min_int(int32_t a, int32_t b) { return a < b ? a : b; }

// Nearest integer, ties to even, for |x| < 2^22: at 1.5 * 2^23 the float grid is the integers.
SHARDOPT_HD int32_t round_to_int(float x) {
  constexpr float kShift = 12582912.0f;
  return bits(x + kShift) - 0x4b400000;
}

// x with the sign of the code q.
SHARDOPT_HD float with_sign_of(float x, int32_t q) {
  return float_from_bits(bits(x) | (q & static_cast<int32_t>(0x80000000)));
}

SHARDOPT_HD float float_from_bf16(uint16_t h) { return float_from_bits(static_cast<int32_t>(h) << 16); }

SHARDOPT_HD uint16_t bf16_from_float(float x) {
  const uint32_t b = static_cast<uint32_t>(bits(x));
  const uint32_t rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(magnitude_bits(x) > kInfinityBits ? 0x7fc0u : rounded);
}

SHARDOPT_HD float float_from_fp16(uint16_t h) {
  const int32_t sign = static_cast<int32_t>(static_cast<uint32_t>(h & 0x8000u) << 16);
  const int32_t rest = h & 0x7fff;
  const int32_t normal = (rest << 13) + (112 << 23);
  const int32_t special = (rest << 13) | kInfinityBits;
  const int32_t subnormal = bits(static_cast<float>(rest) * 5.9604644775390625e-8f);  // 2^-24
  const int32_t magnitude = rest >= 0x7c00 ? special : (rest < 0x0400 ? subnormal : normal);
  return float_from_bits(sign | magnitude);
}

SHARDOPT_HD uint16_t fp16_from_float(float x) {
  const int32_t b = magnitude_bits(x);
  const uint32_t sign = (static_cast<uint32_t>(bits(x)) >> 16) & 0x8000u;
  const int32_t normal = (b + 0xfff + ((b >> 13) & 1) - (112 << 23)) >> 13;
  // Below 2^-14 the grid of binary16 is that of binary32 in [0.5, 1).
  const int32_t subnormal = bits(float_from_bits(b) + 0.5f) - 0x3f000000;
  const int32_t finite = b < 0x38800000 ? subnormal : normal;
  const int32_t large = b > kInfinityBits ? 0x7e00 : 0x7c00;
  return static_cast<uint16_t>(sign | static_cast<uint32_t>(b >= 0x477ff000 ? large : finite));
}

SHARDOPT_END_NAMESPACE
