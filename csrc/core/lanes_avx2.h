// One native vector of AVX2: 8 lanes.
#pragma once

#include <immintrin.h>

#include "core/native.h"

SHARDOPT_BEGIN_NAMESPACE
namespace native {

SHARDOPT_HD bool any(Mask m) { return _mm256_movemask_ps((__m256)m) != 0; }
SHARDOPT_HD int count(Mask m) { return __builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps((__m256)m))); }

SHARDOPT_HD Floats select(Mask m, Floats yes, Floats no) {
  return (Floats)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)m);
}
SHARDOPT_HD Ints select(Mask m, Ints yes, Ints no) {
  return (Ints)_mm256_blendv_epi8((__m256i)no, (__m256i)yes, (__m256i)m);
}

SHARDOPT_HD Floats fma(Floats a, Floats b, Floats c) {
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
SHARDOPT_HD Doubles load_doubles(const float* from) { return (Doubles)_mm256_cvtps_pd(_mm_loadu_ps(from)); }
SHARDOPT_HD Doubles add_product(Doubles a, Doubles b, Doubles sum) {
  return (Doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)sum);
}
SHARDOPT_HD Floats square_root(Floats a) { return (Floats)_mm256_sqrt_ps((__m256)a); }
SHARDOPT_HD Ints max_int(Ints a, Ints b) { return (Ints)_mm256_max_epi32((__m256i)a, (__m256i)b); }
SHARDOPT_HD Ints min_int(Ints a, Ints b) { return (Ints)_mm256_min_epi32((__m256i)a, (__m256i)b); }
SHARDOPT_HD UnsignedInts max_int(UnsignedInts a, UnsignedInts b) {
  return (UnsignedInts)_mm256_max_epu32((__m256i)a, (__m256i)b);
}
SHARDOPT_HD Halves max_int(Halves a, Halves b) { return (Halves)_mm256_max_epu16((__m256i)a, (__m256i)b); }
SHARDOPT_HD UnsignedInts min_int(UnsignedInts a, UnsignedInts b) {
  return (UnsignedInts)_mm256_min_epu32((__m256i)a, (__m256i)b);
}

SHARDOPT_HD uint32_t largest(UnsignedInts a) {
  __m128i y = _mm_max_epu32(_mm256_castsi256_si128((__m256i)a), _mm256_extracti128_si256((__m256i)a, 1));
  y = _mm_max_epu32(y, _mm_shuffle_epi32(y, 0x4e));
  y = _mm_max_epu32(y, _mm_shuffle_epi32(y, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(y));
}
SHARDOPT_HD uint32_t smallest(UnsignedInts a) {
  __m128i y = _mm_min_epu32(_mm256_castsi256_si128((__m256i)a), _mm256_extracti128_si256((__m256i)a, 1));
  y = _mm_min_epu32(y, _mm_shuffle_epi32(y, 0x4e));
  y = _mm_min_epu32(y, _mm_shuffle_epi32(y, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(y));
}

SHARDOPT_HD Ints load(const uint8_t* from) {
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
SHARDOPT_HD Ints load(const int8_t* from) {
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
SHARDOPT_HD Ints load(const uint16_t* from) {
  return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
SHARDOPT_HD Ints load(const int16_t* from) {
  return (Ints)_mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
SHARDOPT_HD void store(uint8_t* to, Ints a) {
  // The low byte of each lane to the bottom of its half, then both halves together.
  const __m256i low =
      _mm256_shuffle_epi8((__m256i)a, _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0,
                                                       4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
  const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), both);
}
SHARDOPT_HD void store(uint16_t* to, Ints a) {
  const __m256i packed = _mm256_packus_epi32((__m256i)(a & 0xffff), _mm256_setzero_si256());
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}

template <int kSize>
SHARDOPT_HD Floats lookup(const float* table, Ints index) {
  if constexpr (kSize == 8) return (Floats)_mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)index);
  return (Floats)_mm256_i32gather_ps(table, (__m256i)index, 4);
}

}  // namespace native
SHARDOPT_END_NAMESPACE
