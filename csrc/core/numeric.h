// IEEE float32 building blocks whose results are the same bits on every device and instruction set.
//
// Rules and codecs are templates over F: `float` (CUDA, and one element at a time), or the CPU's vectors `Floats` of
// core/lanes.h, which overloads the same functions. Compiled without contraction (-ffp-contract=off, --fmad=false): a
// fused multiply-add happens only where `fma` is written. Rounding is to nearest even and subnormals are kept.
#pragma once

#include "core/target.h"

SHARDOPT_BEGIN_NAMESPACE

constexpr int32_t kInfinityBits = 0x7f800000;
constexpr int32_t kMagnitudeMask = 0x7fffffff;
constexpr int32_t kSignMask = static_cast<int32_t>(0x80000000);

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

SHARDOPT_HD uint32_t as_unsigned(int32_t i) { return static_cast<uint32_t>(i); }
SHARDOPT_HD int32_t as_signed(uint32_t i) { return static_cast<int32_t>(i); }

SHARDOPT_HD float to_float(int32_t i) { return static_cast<float>(i); }

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

// 1 / x, correctly rounded.
SHARDOPT_HD float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  return __frcp_rn(x);
#else
  return 1.0f / x;
#endif
}

SHARDOPT_HD int32_t max_int(int32_t a, int32_t b) { return a > b ? a : b; }
SHARDOPT_HD int32_t min_int(int32_t a, int32_t b) { return a < b ? a : b; }

SHARDOPT_HD float select(bool condition, float yes, float no) { return condition ? yes : no; }
SHARDOPT_HD int32_t select(bool condition, int32_t yes, int32_t no) { return condition ? yes : no; }

// table[index]; the table has kSize floats. A table of 8 is indexed by the index's lowest three bits.
template <int kSize>
SHARDOPT_HD float lookup(const float* table, int32_t index) {
  return table[kSize == 8 ? index & 7 : index];
}

SHARDOPT_HD bool any(bool condition) { return condition; }

// x, with its computation hidden from nvcc, which would otherwise take c * step + x apart.
SHARDOPT_HD int32_t opaque(int32_t x) {
#if defined(__CUDA_ARCH__)
  asm("" : "+r"(x));
#endif
  return x;
}

// A number or vector whose elements are all x.
template <class F>
SHARDOPT_HD F spread(float x) {
  return F(x);
}
template <class I>
SHARDOPT_HD I spread(int32_t x) {
  return I(x);
}

SHARDOPT_END_NAMESPACE

#if defined(SHARDOPT_LANES)
#include "core/lanes.h"
#endif

SHARDOPT_BEGIN_NAMESPACE

template <class F>
using IntOf = decltype(bits(F{}));

template <class F>
SHARDOPT_HD IntOf<F> magnitude_bits(F x) {
  return bits(x) & kMagnitudeMask;
}

template <class F>
SHARDOPT_HD F magnitude(F x) {
  return float_from_bits(magnitude_bits(x));
}

// x moved up by `by` bits, whatever its sign; bits beyond the word are lost.
template <class I>
SHARDOPT_HD I moved_up(I x, int by) {
  return as_signed(as_unsigned(x) << by);
}

// Around 1.5 * 2^23, floats are the integers.
constexpr float kWhole = 12582912.0f;
constexpr int32_t kWholeBits = 0x4b400000;

// Nearest integer, ties to even, for |x| < 2^22.
template <class F>
SHARDOPT_HD IntOf<F> round_to_int(F x) {
  return bits(x + kWhole) - kWholeBits;
}

// x * y + z, computed exactly and rounded to the nearest integer, ties to even, for |x * y + z| < 2^22. z is whole.
template <class F>
SHARDOPT_HD IntOf<F> round_fma_to_int(F x, float y, float z) {
  return bits(fma(x, y, kWhole + z)) - kWholeBits;
}

// x >= 0 with the sign of the code q.
template <class F>
SHARDOPT_HD F with_sign_of(F x, IntOf<F> q) {
  return float_from_bits(bits(x) | (q & kSignMask));
}

// 16-bit floats stand in the low half of an integer.

template <class I>
SHARDOPT_HD auto float_from_bf16(I h) {
  return float_from_bits(h << 16);
}

template <class F>
SHARDOPT_HD IntOf<F> bf16_from_float(F x) {
  using I = IntOf<F>;
  const auto b = as_unsigned(bits(x));  // a NaN may carry into the sign and beyond
  const I rounded = as_signed((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
  return select(x != x, spread<I>(0x7fff), rounded);  // the NaN of NVIDIA's instruction
}

template <class I>
SHARDOPT_HD auto float_from_fp16(I h) {
  const I sign = (h & 0x8000) << 16;
  const I rest = h & 0x7fff;
  const I normal = (rest << 13) + (112 << 23);
  const I special = (rest << 13) | kInfinityBits;
  const I subnormal = bits(to_float(rest) * 5.9604644775390625e-8f);  // 2^-24
  return float_from_bits(sign | select(rest >= 0x7c00, special, select(rest < 0x0400, subnormal, normal)));
}

template <class F>
SHARDOPT_HD IntOf<F> fp16_from_float(F x) {
  using I = IntOf<F>;
  const I b = magnitude_bits(x);
  const I sign = (bits(x) >> 16) & 0x8000;
  const I normal = (b + 0xfff + ((b >> 13) & 1) - (112 << 23)) >> 13;
  // Below 2^-14 the grid of binary16 is that of binary32 in [0.5, 1).
  const I subnormal = bits(float_from_bits(b) + 0.5f) - 0x3f000000;
  const I finite = select(b < 0x38800000, subnormal, normal);
  const I large = select(b > kInfinityBits, spread<I>(0x7e00), spread<I>(0x7c00));
  return sign | select(b >= 0x477ff000, large, finite);
}

SHARDOPT_END_NAMESPACE
