// One native vector of AVX-512: 16 lanes.
#pragma once

#include <immintrin.h>

#include "core/native.h"

SHARDOPT_BEGIN_NAMESPACE
namespace native {

using Mask = __mmask16;

SHARDOPT_HD Mask equal(Ints a, Ints b) { return _mm512_cmpeq_epi32_mask((__m512i)a, (__m512i)b); }
SHARDOPT_HD Mask greater(Ints a, Ints b) { return _mm512_cmpgt_epi32_mask((__m512i)a, (__m512i)b); }
SHARDOPT_HD Mask at_least(Ints a, Ints b) { return _mm512_cmpge_epi32_mask((__m512i)a, (__m512i)b); }
SHARDOPT_HD Mask less(Ints a, Ints b) { return _mm512_cmplt_epi32_mask((__m512i)a, (__m512i)b); }
SHARDOPT_HD Mask greater(Floats a, Floats b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ); }
SHARDOPT_HD Mask less(Floats a, Floats b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ); }
SHARDOPT_HD Mask not_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_NEQ_UQ); }
SHARDOPT_HD bool any(Mask m) { return m != 0; }
SHARDOPT_HD int count(Mask m) { return __builtin_popcount(m); }

SHARDOPT_HD Floats select(Mask m, Floats yes, Floats no) {
  return (Floats)_mm512_mask_mov_ps((__m512)no, m, (__m512)yes);
}
SHARDOPT_HD Ints select(Mask m, Ints yes, Ints no) { return (Ints)_mm512_mask_mov_epi32((__m512i)no, m, (__m512i)yes); }

SHARDOPT_HD Floats fma(Floats a, Floats b, Floats c) {
  return (Floats)(_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c));
}
SHARDOPT_HD Doubles load_doubles(const float* from) { return (Doubles)_mm512_cvtps_pd(_mm256_loadu_ps(from)); }
SHARDOPT_HD Doubles add_product(Doubles a, Doubles b, Doubles sum) {
  return (Doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)sum);
}
SHARDOPT_HD Floats square_root(Floats a) { return (Floats)_mm512_sqrt_ps((__m512)a); }
SHARDOPT_HD Ints max_int(Ints a, Ints b) { return (Ints)_mm512_max_epi32((__m512i)a, (__m512i)b); }
SHARDOPT_HD Ints min_int(Ints a, Ints b) { return (Ints)_mm512_min_epi32((__m512i)a, (__m512i)b); }
SHARDOPT_HD UnsignedInts max_int(UnsignedInts a, UnsignedInts b) {
  return (UnsignedInts)_mm512_max_epu32((__m512i)a, (__m512i)b);
}
SHARDOPT_HD Halves max_int(Halves a, Halves b) { return (Halves)_mm512_max_epu16((__m512i)a, (__m512i)b); }
SHARDOPT_HD UnsignedInts min_int(UnsignedInts a, UnsignedInts b) {
  return (UnsignedInts)_mm512_min_epu32((__m512i)a, (__m512i)b);
}
SHARDOPT_HD uint32_t largest(UnsignedInts a) { return _mm512_reduce_max_epu32((__m512i)a); }
SHARDOPT_HD uint32_t smallest(UnsignedInts a) { return _mm512_reduce_min_epu32((__m512i)a); }

SHARDOPT_HD Ints load(const uint8_t* from) {
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
SHARDOPT_HD Ints load(const int8_t* from) {
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
SHARDOPT_HD Ints load(const uint16_t* from) {
  return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
SHARDOPT_HD Ints load(const int16_t* from) {
  return (Ints)_mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
SHARDOPT_HD void store(uint8_t* to, Ints a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)a));
}
SHARDOPT_HD void store(uint16_t* to, Ints a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16((__m512i)a));
}

// Whether any byte is zero.
#define SHARDOPT_FINDS_ZERO_BYTES
SHARDOPT_HD bool any_zero(Bytes a) { return _mm512_testn_epi8_mask((__m512i)a, (__m512i)a) != 0; }
SHARDOPT_HD Bytes min_byte(Bytes a, Bytes b) { return (Bytes)_mm512_min_epu8((__m512i)a, (__m512i)b); }

template <int kSize>
SHARDOPT_HD Floats lookup(const float* table, Ints index) {
  const __m512i at = (__m512i)index;
  if constexpr (kSize > 256) {
    return (Floats)_mm512_i32gather_ps(at, table, 4);
  } else if constexpr (kSize == 8) {
    return (Floats)_mm512_permutexvar_ps(at, _mm512_broadcast_f32x8(_mm256_loadu_ps(table)));
  } else if constexpr (kSize == 16) {
    return (Floats)_mm512_permutexvar_ps(at, _mm512_loadu_ps(table));
  } else {
    // Five bits of the index choose within 32 values, each further bit between two halves of the values found so far.
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

#if defined(__AVX512VBMI__)
#define SHARDOPT_BYTE_TABLES

// A table of floats as four tables of bytes, in each of which one or two instructions look up 64 codes. A table of 128
// has the values of magnitudes, and its codes are signed.
template <int kSize>
struct ByteTable {
  alignas(64) uint8_t plane[4][kSize];

  SHARDOPT_HD explicit ByteTable(const float* table) {
    for (int i = 0; i < kSize; ++i) {
      int32_t value;
      __builtin_memcpy(&value, table + i, sizeof value);
      for (int j = 0; j < 4; ++j) plane[j][i] = static_cast<uint8_t>(value >> (8 * j));
    }
  }

  SHARDOPT_HD __m512i in_plane(int j, __m512i index) const {
    const __m512i* part = reinterpret_cast<const __m512i*>(plane[j]);
    const __m512i found = _mm512_permutex2var_epi8(part[0], index, part[1]);
    if constexpr (kSize == 128) return found;
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), found,
                                  _mm512_permutex2var_epi8(part[kSize / 64 - 2], index, part[kSize / 64 - 1]));
  }

  // The values of 64 codes. Each quarter of `code` has four codes of to[0], then four of to[1], ...
  SHARDOPT_HD void look_up(__m512i code, Floats* to) const {
    __m512i index = code, byte[4];
    if constexpr (kSize == 128) index = _mm512_min_epu8(_mm512_abs_epi8(code), _mm512_set1_epi8(127));
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) byte[j] = in_plane(j, index);
    if constexpr (kSize == 128) {
      byte[3] = _mm512_ternarylogic_epi32(byte[3], code, _mm512_set1_epi8(-128), 0xf8);  // byte | (code & 0x80)
    }
    // Interleaving bytes, then pairs of bytes, deals them out within quarters of a vector.
    const __m512i low01 = _mm512_unpacklo_epi8(byte[0], byte[1]), high01 = _mm512_unpackhi_epi8(byte[0], byte[1]);
    const __m512i low23 = _mm512_unpacklo_epi8(byte[2], byte[3]), high23 = _mm512_unpackhi_epi8(byte[2], byte[3]);
    to[0] = (Floats)_mm512_unpacklo_epi16(low01, low23);
    to[1] = (Floats)_mm512_unpackhi_epi16(low01, low23);
    to[2] = (Floats)_mm512_unpacklo_epi16(high01, high23);
    to[3] = (Floats)_mm512_unpackhi_epi16(high01, high23);
  }

  SHARDOPT_HD void look_up(const uint8_t* codes, Floats* to) const {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    look_up(_mm512_permutexvar_epi32(order, _mm512_loadu_si512(codes)), to);
  }

  // Looks up 64 indices, which fill four vectors.
  SHARDOPT_HD void look_up(const Ints* index, Floats* to) const {
    const __m512i low = _mm512_packus_epi32((__m512i)index[0], (__m512i)index[1]);
    const __m512i high = _mm512_packus_epi32((__m512i)index[2], (__m512i)index[3]);
    look_up(_mm512_packus_epi16(low, high), to);
  }
};
#endif

}  // namespace native
SHARDOPT_END_NAMESPACE
