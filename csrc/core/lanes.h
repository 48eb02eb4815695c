// The CPU's vector of floats and what rules and codecs do with it, on the compiler's generic vectors. Only what these
// do badly or not at all is written per instruction set.
#pragma once

#include "core/target.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

SHARDOPT_BEGIN_NAMESPACE

constexpr int kLanes = SHARDOPT_LANES;

typedef float Floats __attribute__((vector_size(4 * SHARDOPT_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * SHARDOPT_LANES)));
typedef uint32_t UnsignedInts __attribute__((vector_size(4 * SHARDOPT_LANES)));

SHARDOPT_HD Ints bits(Floats x) { return reinterpret_cast<Ints>(x); }
SHARDOPT_HD Floats float_from_bits(Ints b) { return reinterpret_cast<Floats>(b); }
SHARDOPT_HD UnsignedInts as_unsigned(Ints i) { return reinterpret_cast<UnsignedInts>(i); }
SHARDOPT_HD Ints as_signed(UnsignedInts i) { return reinterpret_cast<Ints>(i); }
SHARDOPT_HD Floats to_float(Ints i) { return __builtin_convertvector(i, Floats); }

SHARDOPT_HD Floats select(Ints mask, Floats yes, Floats no) { return mask ? yes : no; }
SHARDOPT_HD Ints select(Ints mask, Ints yes, Ints no) { return mask ? yes : no; }

SHARDOPT_HD Floats as_lanes(Floats x) { return x; }
SHARDOPT_HD Floats as_lanes(float x) { return x - Floats{}; }  // not 0 + x: -0 would lose its sign

#if defined(__AVX512F__)

SHARDOPT_HD Floats fma_lanes(Floats a, Floats b, Floats c) {
  return (Floats)(_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c));
}
SHARDOPT_HD Floats square_root(Floats x) { return (Floats)_mm512_sqrt_ps((__m512)x); }
SHARDOPT_HD Ints max_int(Ints a, Ints b) { return (Ints)_mm512_max_epi32((__m512i)a, (__m512i)b); }
SHARDOPT_HD Ints min_int(Ints a, Ints b) { return (Ints)_mm512_min_epi32((__m512i)a, (__m512i)b); }

SHARDOPT_HD Ints load_lanes(const uint8_t* from) {
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
SHARDOPT_HD Ints load_lanes(const uint16_t* from) {
  return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
SHARDOPT_HD void store_lanes(uint8_t* to, Ints x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)x));
}
SHARDOPT_HD void store_lanes(uint16_t* to, Ints x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16((__m512i)x));
}

// 32 entries at a time, chosen by the upper bits of the index.
template <int kSize>
SHARDOPT_HD Floats lookup(const float* table, Ints index) {
  const __m512i at = (__m512i)index;
  if constexpr (kSize > 256) {
    return (Floats)_mm512_i32gather_ps(at, table, 4);
  } else {
    // Five bits of the index choose within 32 entries, each further bit between two halves of what was found.
    constexpr int kParts = kSize / 32;
    __m512 found[kParts];
#pragma GCC unroll 8
    for (int i = 0; i < kParts; ++i) {
      found[i] = _mm512_permutex2var_ps(_mm512_loadu_ps(table + 32 * i), at, _mm512_loadu_ps(table + 32 * i + 16));
    }
#pragma GCC unroll 3
    for (int half = kParts / 2, bit = kSize / 2; half > 0; half /= 2, bit /= 2) {
      const __mmask16 upper = _mm512_test_epi32_mask(at, _mm512_set1_epi32(bit));
#pragma GCC unroll 4
      for (int i = 0; i < half; ++i) found[i] = _mm512_mask_mov_ps(found[i], upper, found[i + half]);
    }
    return (Floats)found[0];
  }
}

SHARDOPT_HD int32_t largest(Ints x) { return _mm512_reduce_max_epi32((__m512i)x); }

#elif defined(__AVX2__)

SHARDOPT_HD Floats fma_lanes(Floats a, Floats b, Floats c) {
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
SHARDOPT_HD Floats square_root(Floats x) { return (Floats)_mm256_sqrt_ps((__m256)x); }
SHARDOPT_HD Ints max_int(Ints a, Ints b) { return (Ints)_mm256_max_epi32((__m256i)a, (__m256i)b); }
SHARDOPT_HD Ints min_int(Ints a, Ints b) { return (Ints)_mm256_min_epi32((__m256i)a, (__m256i)b); }

SHARDOPT_HD Ints load_lanes(const uint8_t* from) {
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
SHARDOPT_HD Ints load_lanes(const uint16_t* from) {
  return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
SHARDOPT_HD void store_lanes(uint8_t* to, Ints x) {
  // The low byte of each lane to the bottom of its half, then both halves together.
  const __m256i low =
      _mm256_shuffle_epi8((__m256i)x, _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0,
                                                       4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
  const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), both);
}
SHARDOPT_HD void store_lanes(uint16_t* to, Ints x) {
  const __m256i packed = _mm256_packus_epi32((__m256i)(x & 0xffff), _mm256_setzero_si256());
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}

template <int kSize>
SHARDOPT_HD Floats lookup(const float* table, Ints index) {
  return (Floats)_mm256_i32gather_ps(table, (__m256i)index, 4);
}

SHARDOPT_HD int32_t largest(Ints x) {
  __m128i y = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0xb1));
  return _mm_cvtsi128_si32(y);
}

#else

SHARDOPT_HD Floats fma_lanes(Floats a, Floats b, Floats c) {
  for (int i = 0; i < kLanes; ++i) a[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return a;
}
SHARDOPT_HD Ints max_int(Ints a, Ints b) { return a > b ? a : b; }
SHARDOPT_HD Ints min_int(Ints a, Ints b) { return a < b ? a : b; }
SHARDOPT_HD Floats square_root(Floats x) {
  for (int i = 0; i < kLanes; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
}

template <class T>
SHARDOPT_HD Ints load_lanes(const T* from) {
  Ints x{};
  for (int i = 0; i < kLanes; ++i) x[i] = from[i];
  return x;
}
template <class T>
SHARDOPT_HD void store_lanes(T* to, Ints x) {
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<T>(x[i]);
}

template <int kSize>
SHARDOPT_HD Floats lookup(const float* table, Ints index) {
  Floats x{};
  for (int i = 0; i < kLanes; ++i) x[i] = table[index[i]];
  return x;
}

SHARDOPT_HD int32_t largest(Ints x) {
  int32_t y = x[0];
  for (int i = 1; i < kLanes; ++i) y = x[i] > y ? x[i] : y;
  return y;
}

#endif

template <class A, class B, class C>
SHARDOPT_HD Floats fma(A a, B b, C c) {
  return fma_lanes(as_lanes(a), as_lanes(b), as_lanes(c));
}

SHARDOPT_HD Floats load_lanes(const float* from) {
  Floats x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}
SHARDOPT_HD void store_lanes(float* to, Floats x) { __builtin_memcpy(to, &x, sizeof x); }

SHARDOPT_END_NAMESPACE
