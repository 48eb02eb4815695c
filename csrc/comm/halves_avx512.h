// Codes a block with AVX-512, 32 numbers at a time, as bfloat16 in 16-bit integers. float32 and float16 are rounded to
// odd first: a number between two bfloat16 becomes the one whose last bit is 1, so that rounding it once more, to fewer
// bits, rounds the number itself.
#pragma once

#include "comm/e4m3.h"

SHARDOPT_BEGIN_NAMESPACE
namespace {

struct BlockOfHalves {
  __m512i x[kMessageBlock / 32];
};

SHARDOPT_HD __m512i halves_to_odd(__m512 first, __m512 second) {
  const __m512i each_other = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28,
                                              26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i one = _mm512_set1_epi16(1);
  const __m512i a = _mm512_castps_si512(first), b = _mm512_castps_si512(second);
  const __m512i low = _mm512_permutex2var_epi16(a, each_other, b);
  const __m512i high = _mm512_permutex2var_epi16(a, _mm512_add_epi16(each_other, one), b);
  return _mm512_or_si512(high, _mm512_min_epu16(low, one));
}

template <DType kDType>
SHARDOPT_HD BlockOfHalves load_halves(const char* from) {
  BlockOfHalves block;
#pragma GCC unroll 4
  for (int i = 0; i < kMessageBlock / 32; ++i) {
    if constexpr (kDType == DType::kFloat32) {
      block.x[i] = halves_to_odd(_mm512_loadu_ps(from + 128 * i), _mm512_loadu_ps(from + 128 * i + 64));
    } else {
      block.x[i] = _mm512_loadu_si512(from + 64 * i);
      if constexpr (kDType == DType::kFloat16) {
        block.x[i] = halves_to_odd(_mm512_cvtph_ps(_mm512_castsi512_si256(block.x[i])),
                                   _mm512_cvtph_ps(_mm512_extracti64x4_epi64(block.x[i], 1)));
      }
    }
  }
  return block;
}

// The bits of the largest magnitude in a block.
SHARDOPT_HD int32_t largest_of(const BlockOfHalves& block) {
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  __m512i y = _mm512_and_si512(block.x[0], magnitude);
#pragma GCC unroll 4
  for (int i = 1; i < kMessageBlock / 32; ++i) y = _mm512_max_epu16(y, _mm512_and_si512(block.x[i], magnitude));
  const __m256i y256 = _mm256_max_epu16(_mm512_castsi512_si256(y), _mm512_extracti64x4_epi64(y, 1));
  const __m128i y128 = _mm_max_epu16(_mm256_castsi256_si128(y256), _mm256_extracti128_si256(y256, 1));
  return 0xffff - _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(y128, _mm_set1_epi16(-1))), 0);
}

// Codes finite numbers, at a scale that leaves no number above 448 and is at least kLeastHalvesScale, so that subnormal
// bfloat16 have the code 0.
constexpr int32_t kLeastHalvesScale = 12;

SHARDOPT_HD void encode_halves(const BlockOfHalves& block, int32_t scale, uint8_t* codes) {
  constexpr int kVectors = kMessageBlock / 32;
  const __m512i magnitude = _mm512_set1_epi16(0x7fff), smallest_normal = _mm512_set1_epi16(1 << 7);
  const __m512i moved = _mm512_set1_epi16(static_cast<short>((scale - 7) << 7));
  __m512i y[kVectors];  // numbers over the scale: E4M3's exponent, 7 bits of mantissa, 4 zeros
  __mmask32 subnormal[kVectors], any = 0;
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) {
    y[i] = _mm512_sub_epi16(_mm512_and_si512(block.x[i], magnitude), moved);
    subnormal[i] = _mm512_cmplt_epi16_mask(y[i], smallest_normal);
    any |= subnormal[i];
  }
  if (__builtin_expect(any != 0, 0)) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {  // the mantissa and its leading 1, moved down; lost bits are below 1/16 unit
      const __m512i steps = _mm512_sub_epi16(_mm512_set1_epi16(1), _mm512_srai_epi16(y[i], 7));
      const __m512i mantissa = _mm512_and_si512(block.x[i], _mm512_set1_epi16(0x7f));
      const __m512i whole = _mm512_slli_epi16(_mm512_or_si512(mantissa, smallest_normal), 4);
      y[i] = _mm512_mask_srlv_epi16(_mm512_slli_epi16(y[i], 4), subnormal[i], whole, steps);
    }
  } else {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) y[i] = _mm512_slli_epi16(y[i], 4);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) {  // to the nearest upper byte, ties to even; with the sign, it is the code
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(y[i], 8), _mm512_set1_epi16(1));
    const __m512i rounded = _mm512_add_epi16(_mm512_add_epi16(y[i], _mm512_set1_epi16(127)), odd);
    y[i] = _mm512_srli_epi16(_mm512_ternarylogic_epi32(magnitude, rounded, block.x[i], 0xca), 8);
  }
  const __m512i order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
#pragma GCC unroll 2
  for (int i = 0; i < kVectors; i += 2) {
    const __m512i packed = _mm512_packus_epi16(y[i], y[i + 1]);
    _mm512_storeu_si512(codes + 32 * i, _mm512_permutexvar_epi64(order, packed));
  }
}

}  // namespace
SHARDOPT_END_NAMESPACE
