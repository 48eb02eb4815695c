// Consecutive elements of a lane as words of 32 bits: moves them, takes them apart and puts them together.
#pragma once

#include <type_traits>

#include "step/cuda_lane.h"

SHARDOPT_BEGIN_NAMESPACE

// Consecutive elements, moved at once.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Words {
  T x[kCount];
};

// The type by which the device moves kBytes bytes at once.
template <size_t kBytes>
using Moved = std::conditional_t<kBytes == 16, uint4, std::conditional_t<kBytes == 8, uint2, uint32_t>>;

template <class T>
SHARDOPT_DEVICE void store_streaming(void* to, const T& words) {
  Moved<sizeof(T)> v;
  static_assert(sizeof v == sizeof words);
  __builtin_memcpy(&v, &words, sizeof v);
  __stcs(static_cast<Moved<sizeof(T)>*>(to), v);
}

template <WeightFormat kFormat>
struct WeightTypes {
  using High = uint16_t;
  using Low = void;
};
template <>
struct WeightTypes<WeightFormat::kFloat32> {
  using High = float;
  using Low = void;
};
template <>
struct WeightTypes<WeightFormat::kBFloat16Plus8> {
  using High = uint16_t;
  using Low = int8_t;
};
template <>
struct WeightTypes<WeightFormat::kBFloat16Plus16> {
  using High = uint16_t;
  using Low = int16_t;
};

// Byte k of a word.
SHARDOPT_DEVICE int32_t byte_of(uint32_t word, int k) { return static_cast<int32_t>(__byte_perm(word, 0, 0x4440 + k)); }

// Byte k of a word as a signed number, times 2^8; half k of a word as a signed number.
SHARDOPT_DEVICE int32_t signed_byte_of(uint32_t word, int k) {
  // In assembly: __byte_perm reads three bits of each digit of the selector, not the fourth, which selects the byte's
  // sign.
  uint32_t x;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(word), "r"(0), "r"(0x8804 + k * 0x1110));
  return static_cast<int32_t>(x);
}
SHARDOPT_DEVICE int32_t signed_half_of(uint32_t word, int k) { return static_cast<int16_t>(word >> (16 * k)); }

// Packs half k of two words; byte k of four words.
SHARDOPT_DEVICE uint32_t halves_of(uint32_t a, uint32_t b, int k) {
  return __byte_perm(a, b, k == 0 ? 0x5410 : 0x7632);
}
SHARDOPT_DEVICE uint32_t bytes_of(const uint32_t* words, int k) {
  const int selector = k | (4 + k) << 4;
  return __byte_perm(__byte_perm(words[0], words[1], selector), __byte_perm(words[2], words[3], selector), 0x5410);
}

// A master weight's word plus half a unit of the parameter. The upper half of the result is the parameter; the bits
// below, with the first of them turned, are the low bits.
template <int kLowBits>
SHARDOPT_DEVICE uint32_t raised_word(float weight) {
  const auto word = static_cast<uint32_t>(bits(weight));
  if (kLowBits == 16) return word + 0x8000u;
  // word + 0x8000 + 0x7f + (word >> 8 & 1), rounded to even, in two instructions: the last term is added as a carry.
  return static_cast<uint32_t>(((uint64_t{word} << 32 | word << 23) + 0x807f80000000u) >> 32);
}

// A table in shared memory, whose address there is computed once. The compiler does not see that `value` reads memory:
// the load stays behind the thread block's barrier because its index comes from a load that does.
struct SharedTable {
  uint32_t address;
  SHARDOPT_DEVICE explicit SharedTable(const float* table)
      : address(static_cast<uint32_t>(opaque(static_cast<int32_t>(__cvta_generic_to_shared(table))))) {}

  // The value whose index is byte k of the word.
  SHARDOPT_DEVICE float value(uint32_t word, int k) const {
    float x;
    asm("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(__dp4a(word, 4u << (8 * k), address)));
    return x;
  }
};

// Half k of a word, a bfloat16.
SHARDOPT_DEVICE float bf16_of(uint32_t word, int k) {
  return float_from_bits(static_cast<int32_t>(k == 0 ? word << 16 : word & 0xffff0000u));
}

// The elements of a part, taken apart from its words.
template <class T, int kCount>
struct Packed {
  uint32_t words[kCount * sizeof(T) / 4];

  SHARDOPT_DEVICE explicit Packed(const Words<T, kCount>& part) {
    const auto v = *reinterpret_cast<const Moved<sizeof part>*>(&part);
    __builtin_memcpy(words, &v, sizeof words);
  }
  SHARDOPT_DEVICE int32_t code(int j) const { return byte_of(words[j / 4], j % 4); }
  SHARDOPT_DEVICE float number(int j) const {
    return sizeof(T) == 4 ? float_from_bits(static_cast<int32_t>(words[j])) : bf16_of(words[j / 2], j % 2);
  }
};

// Not zero if any of the codes is zero.
template <int kCount>
SHARDOPT_DEVICE uint32_t zero_bytes(const Packed<uint8_t, kCount>& codes) {
  uint32_t found = 0;
#pragma unroll
  for (const uint32_t word : codes.words) found |= (word - 0x01010101u) & ~word;
  return found & 0x80808080u;
}

// Packs half k of each word.
template <class Part, int kParts, int kWords>
SHARDOPT_DEVICE void pack_halves(Part (&to)[kParts], const uint32_t (&word)[kWords], int k) {
  uint32_t packed[kWords / 2];
#pragma unroll
  for (int i = 0; i < kWords; i += 2) packed[i / 2] = halves_of(word[i], word[i + 1], k);
  static_assert(sizeof packed == sizeof to);
  __builtin_memcpy(to, packed, sizeof packed);
}

// Packs byte k of each word and flips the bits that are set in `turned`.
template <class Part, int kParts, int kWords>
SHARDOPT_DEVICE void pack_bytes(Part (&to)[kParts], const uint32_t (&word)[kWords], int k, uint32_t turned = 0) {
  uint32_t packed[kWords / 4];
#pragma unroll
  for (int i = 0; i < kWords; i += 4) packed[i / 4] = bytes_of(word + i, k) ^ turned;
  static_assert(sizeof packed == sizeof to);
  __builtin_memcpy(to, packed, sizeof packed);
}

SHARDOPT_END_NAMESPACE
