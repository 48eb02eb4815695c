// Codes blocks of messages and adds them up on the CPU, compiled once per instruction set (comm/cpu_<target>.cpp).
#pragma once

#include <cstring>

#include "comm/cpu.h"
#include "comm/e4m3.h"
#if defined(__AVX512BW__)
#include "comm/halves_avx512.h"
#endif

SHARDOPT_BEGIN_NAMESPACE
namespace {

constexpr int kPack = SHARDOPT_PACK;
constexpr int kStep = kPack * kLanes;  // elements that are coded together
static_assert(kMessageBlock % kStep == 0, "a block is a whole number of packs");

template <DType kDType>
constexpr int kBytes = kDType == DType::kFloat32 ? 4 : 2;

template <DType kDType>
SHARDOPT_HD Floats<kPack> load_floats(const char* from) {
  if constexpr (kDType == DType::kFloat32) return load_lanes<kPack>(reinterpret_cast<const float*>(from));
  const auto halves = [&] { return load_lanes<kPack>(reinterpret_cast<const uint16_t*>(from)); };
  if constexpr (kDType == DType::kBFloat16) return float_from_bf16(halves());
  if constexpr (kDType == DType::kFloat16) return float_from_fp16(halves());
}

template <DType kDType>
SHARDOPT_HD void store_floats(char* to, Floats<kPack> x) {
  if constexpr (kDType == DType::kFloat32) store_lanes(reinterpret_cast<float*>(to), x);
  if constexpr (kDType == DType::kBFloat16) store_lanes(reinterpret_cast<uint16_t*>(to), bf16_from_float(x));
  if constexpr (kDType == DType::kFloat16) store_lanes(reinterpret_cast<uint16_t*>(to), fp16_from_float(x));
}

template <DType kDType>
SHARDOPT_HD float load_float(const char* from) {
  if constexpr (kDType == DType::kFloat32) {
    float x;
    std::memcpy(&x, from, sizeof x);
    return x;
  } else {
    uint16_t h;
    std::memcpy(&h, from, sizeof h);
    return kDType == DType::kBFloat16 ? float_from_bf16(int32_t{h}) : float_from_fp16(int32_t{h});
  }
}

template <DType kDType>
SHARDOPT_HD void store_float(char* to, float x) {
  if constexpr (kDType == DType::kFloat32) {
    std::memcpy(to, &x, sizeof x);
  } else {
    const auto h = static_cast<uint16_t>(kDType == DType::kBFloat16 ? bf16_from_float(x) : fp16_from_float(x));
    std::memcpy(to, &h, sizeof h);
  }
}

SHARDOPT_HD int32_t largest_of(Ints<kPack> a) {
  native::Ints y = a.x[0];
  for (int i = 1; i < kPack; ++i) y = native::max_int(y, a.x[i]);
  return as_signed(native::largest(native::as_unsigned(y)));
}

// The bits of the largest magnitude in a block.
template <DType kDType>
SHARDOPT_HD int32_t largest_magnitude(const char* from) {
  Ints<kPack> largest(0);
#pragma GCC unroll 8
  for (int i = 0; i < kMessageBlock; i += kStep) {
    largest = max_int(largest, magnitude_bits(load_floats<kDType>(from + i * kBytes<kDType>)));
  }
  return largest_of(largest);
}

// Codes a block with numbers that are not finite, or too large for its scale.
template <DType kDType>
__attribute__((noinline)) uint8_t encode_any(const char* from, uint8_t* codes) {
  int32_t largest = 0;
  for (int i = 0; i < kMessageBlock; ++i) {
    const int32_t b = magnitude_bits(load_float<kDType>(from + i * kBytes<kDType>));
    if (b < kInfinityBits) largest = max_int(largest, b);
  }
  const int32_t scale = scale_code(largest);
  for (int i = 0; i < kMessageBlock; ++i) {
    const float x = load_float<kDType>(from + i * kBytes<kDType>);
    codes[i] = static_cast<uint8_t>(e4m3_from_any(x, eight_scales(scale)));
  }
  return static_cast<uint8_t>(scale);
}

// Codes a whole block; returns its scale.
template <DType kDType>
SHARDOPT_HD uint8_t encode_floats(const char* from, uint8_t* codes) {
  const int32_t largest = largest_magnitude<kDType>(from);
  if (__builtin_expect(largest > kLargestScaledBits, 0)) return encode_any<kDType>(from, codes);
  const int32_t scale = scale_code(largest);
  const Floats<kPack> eight(eight_scales(scale));
#pragma GCC unroll 8
  for (int i = 0; i < kMessageBlock; i += kStep) {
    store_lanes(codes + i, e4m3_from_eight(load_floats<kDType>(from + i * kBytes<kDType>) * eight));
  }
  return static_cast<uint8_t>(scale);
}

#if defined(__AVX512BW__)
template <DType kDType>
__attribute__((noinline)) uint8_t encode_rare(const char* from, uint8_t* codes) {
  return encode_floats<kDType>(from, codes);
}

template <DType kDType>
SHARDOPT_HD uint8_t encode_block(const char* from, uint8_t* codes) {
  const BlockOfHalves block = load_halves<kDType>(from);
  const int32_t largest = largest_of(block) << 16;  // rounding to odd does not change the scale
  const int32_t scale = scale_code(largest);
  if (__builtin_expect(largest > kLargestScaledBits || scale < kLeastHalvesScale, 0)) {
    return encode_rare<kDType>(from, codes);
  }
  encode_halves(block, scale, codes);
  return static_cast<uint8_t>(scale);
}
#else
template <DType kDType>
SHARDOPT_HD uint8_t encode_block(const char* from, uint8_t* codes) {
  return encode_floats<kDType>(from, codes);
}
#endif

// Calls act(chunk, place) for blocks [begin, end) of a layout, counted over the chunks.
template <class Act>
SHARDOPT_HD void each_block(const MessageLayout& layout, int64_t begin, int64_t end, int64_t raw_bytes, Act act) {
  int64_t chunk = begin / layout.blocks, block = begin % layout.blocks, part = part_of(layout, block);
  for (int64_t i = begin; i < end; ++i) {
    while (part + 1 < layout.count && layout.parts[part + 1].first_block <= block) ++part;
    act(chunk, block_place(layout.parts[part], block, raw_bytes));
    if (++block == layout.blocks) {
      block = part = 0;
      ++chunk;
    }
  }
}

template <DType kDType>
void encode(const EncodeCall& call, int64_t begin, int64_t end) {
  each_block(call.layout, begin, end, sizeof(float), [&](int64_t chunk, const BlockPlace& place) {
    const char* from =
        static_cast<const char*>(call.floats) + (chunk * call.layout.numel + place.element) * kBytes<kDType>;
    uint8_t* const message = call.message + chunk * call.layout.bytes;
    uint8_t* const codes = message + place.byte;
    if (!place.is_coded) {
      for (int i = 0; i < place.n; ++i) {
        store_float<DType::kFloat32>(reinterpret_cast<char*>(codes) + 4 * i,
                                     load_float<kDType>(from + i * kBytes<kDType>));
      }
      return;
    }
    uint8_t* const scale = message + place.scale_byte;
    if (place.n == kMessageBlock) {
      *scale = encode_block<kDType>(from, codes);
    } else {
      alignas(64) char floats[kMessageBlock * kBytes<kDType>] = {};
      alignas(64) uint8_t whole[kMessageBlock];
      std::memcpy(floats, from, static_cast<size_t>(place.n * kBytes<kDType>));
      *scale = encode_block<kDType>(floats, whole);
      std::memcpy(codes, whole, static_cast<size_t>(aligned_bytes(place.n)));  // codes beyond n are 0
    }
    std::memset(scale + 1, 0, static_cast<size_t>(place.filling));
  });
}

#if defined(__AVX512F__)
// 2^-8 of the values of 64 codes: a code's bits, moved to the left, are that number as float16. The conversion is
// exact, for subnormals too.
constexpr float kDecodedUnit = 256.0f;

SHARDOPT_HD Floats<4> decode_lanes(const uint8_t* codes) {
  Floats<4> r;
#pragma GCC unroll 2
  for (int i = 0; i < 4; i += 2) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 16 * i));
    const __m512i shifted = _mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 7);
    const __m512i half = _mm512_and_si512(shifted, _mm512_set1_epi16(static_cast<short>(0xbf80)));
    const __m512i low = _mm512_and_si512(shifted, _mm512_set1_epi16(0x3f80));
    const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(low, _mm512_set1_epi16(0x3f80));
    const __m512i all = _mm512_mask_add_epi16(half, is_nan, half, _mm512_set1_epi16(0x7e00 - 0x3f80));
    r.x[i] = (native::Floats)_mm512_cvtph_ps(_mm512_castsi512_si256(all));
    r.x[i + 1] = (native::Floats)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(all, 1));
  }
  return r;
}
#elif defined(__AVX2__)
constexpr float kDecodedUnit = 256.0f;

// AVX2 decodes 16 codes, likewise by float16. The instruction belongs to F16C: comm/cpu.cpp checks that the processor
// has F16C. This file is compiled without -mf16c, so the instruction is written out.
SHARDOPT_HD native::Floats float_from_halves(__m128i halves) {
  native::Floats floats;
  asm("vcvtph2ps %1, %0" : "=x"(floats) : "x"(halves));
  return floats;
}

SHARDOPT_HD Floats<2> decode_lanes(const uint8_t* codes) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
  const __m256i nan = _mm256_set1_epi16(0x3f80), low = _mm256_and_si256(shifted, nan);
  const __m256i to_nan = _mm256_and_si256(_mm256_cmpeq_epi16(low, nan), _mm256_set1_epi16(0x7e00 - 0x3f80));
  const __m256i half = _mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<short>(0xbf80)));
  const __m256i all = _mm256_add_epi16(half, to_nan);
  Floats<2> r;
  r.x[0] = float_from_halves(_mm256_castsi256_si128(all));
  r.x[1] = float_from_halves(_mm256_extracti128_si256(all, 1));
  return r;
}
#else
constexpr float kDecodedUnit = 1.0f;

SHARDOPT_HD Floats<kPack> decode_lanes(const uint8_t* codes) { return float_from_e4m3(load_lanes<kPack>(codes)); }
#endif

SHARDOPT_HD void store_mean(const SumCall& call, int64_t element, Floats<kPack> x) {
  char* const to = static_cast<char*>(call.mean);
  switch (call.dtype) {
    case DType::kFloat32:
      return store_floats<DType::kFloat32>(to + 4 * element, x);
    case DType::kBFloat16:
      return store_floats<DType::kBFloat16>(to + 2 * element, x);
    case DType::kFloat16:
      return store_floats<DType::kFloat16>(to + 2 * element, x);
  }
}

SHARDOPT_HD void store_mean(const SumCall& call, int64_t element, float x) {
  char* const to = static_cast<char*>(call.mean);
  switch (call.dtype) {
    case DType::kFloat32:
      return store_float<DType::kFloat32>(to + 4 * element, x);
    case DType::kBFloat16:
      return store_float<DType::kBFloat16>(to + 2 * element, x);
    case DType::kFloat16:
      return store_float<DType::kFloat16>(to + 2 * element, x);
  }
}

// Adds up one block of the chunks.
template <class Term, class OneTerm>
SHARDOPT_HD void sum_block(const SumCall& call, const BlockPlace& place, Term term, OneTerm one_term) {
  if (place.n == kMessageBlock) {
    Floats<kPack> sums[kMostSums];
    for (int i = 0; i < kMessageBlock; i += kStep) {
      const int64_t element = place.element + i;
      add_terms(
          call, sums, [&](const float* from) { return load_lanes<kPack>(from + element); },
          [&](int64_t t) { return term(t, i); }, [&](float* to, Floats<kPack> x) { store_lanes(to + element, x); },
          [&](Floats<kPack> x) { store_mean(call, element, x); });
    }
    return;
  }
  float sums[kMostSums];
  for (int i = 0; i < place.n; ++i) {
    const int64_t element = place.element + i;
    add_terms(
        call, sums, [&](const float* from) { return from[element]; }, [&](int64_t t) { return one_term(t, i); },
        [&](float* to, float x) { to[element] = x; }, [&](float x) { store_mean(call, element, x); });
  }
}

template <DType kRaw>
void sum(const SumCall& call, int64_t begin, int64_t end) {
  const int64_t bytes = call.layout.bytes;
  each_block(call.layout, begin, end, kBytes<kRaw>, [&](int64_t, const BlockPlace& place) {
    const uint8_t* const codes = call.message + place.byte;
    if (!place.is_coded) {
      const char* const floats = reinterpret_cast<const char*>(codes);
      sum_block(
          call, place, [&](int64_t t, int i) { return load_floats<kRaw>(floats + t * bytes + i * kBytes<kRaw>); },
          [&](int64_t t, int i) { return load_float<kRaw>(floats + t * bytes + i * kBytes<kRaw>); });
      return;
    }
    const uint8_t* const scales = call.message + place.scale_byte;
    sum_block(
        call, place,
        [&](int64_t t, int i) {
          return decode_lanes(codes + t * bytes + i) * Floats<kPack>(kDecodedUnit * scale_value(scales[t * bytes]));
        },
        [&](int64_t t, int i) {
          return float_from_e4m3(int32_t{codes[t * bytes + i]}) * scale_value(scales[t * bytes]);
        });
  });
}

}  // namespace

MessageKernels message_kernels() {
  return {{encode<DType::kFloat32>, encode<DType::kBFloat16>, encode<DType::kFloat16>},
          {sum<DType::kFloat32>, sum<DType::kBFloat16>, sum<DType::kFloat16>}};
}

SHARDOPT_END_NAMESPACE
