// The native vector: the compiler's generic one, as wide as the instruction set's registers.
#pragma once

#include "core/target.h"

SHARDOPT_BEGIN_NAMESPACE

constexpr int kLanes = SHARDOPT_LANES;

namespace native {

typedef float Floats __attribute__((vector_size(4 * SHARDOPT_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * SHARDOPT_LANES)));
typedef uint32_t UnsignedInts __attribute__((vector_size(4 * SHARDOPT_LANES)));
typedef uint8_t Bytes __attribute__((vector_size(4 * SHARDOPT_LANES)));
typedef uint16_t Halves __attribute__((vector_size(4 * SHARDOPT_LANES)));  // twice as many
typedef double Doubles __attribute__((vector_size(4 * SHARDOPT_LANES)));   // half as many

#if SHARDOPT_LANES == 16
constexpr Ints kLaneIndex = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif SHARDOPT_LANES == 8
constexpr Ints kLaneIndex = {0, 1, 2, 3, 4, 5, 6, 7};
#else
constexpr Ints kLaneIndex = {0, 1, 2, 3};
#endif

SHARDOPT_HD Ints bits(Floats a) { return reinterpret_cast<Ints>(a); }
SHARDOPT_HD Floats float_from_bits(Ints a) { return reinterpret_cast<Floats>(a); }
SHARDOPT_HD Floats to_float(Ints a) { return __builtin_convertvector(a, Floats); }
SHARDOPT_HD UnsignedInts as_unsigned(Ints a) { return reinterpret_cast<UnsignedInts>(a); }
SHARDOPT_HD Ints as_signed(UnsignedInts a) { return reinterpret_cast<Ints>(a); }

#if !defined(__AVX2__)
SHARDOPT_HD Doubles load_doubles(const float* from) {
  float copy __attribute__((vector_size(2 * SHARDOPT_LANES)));
  __builtin_memcpy(&copy, from, sizeof copy);
  return __builtin_convertvector(copy, Doubles);
}
// a * b + sum, rounded once, for a product that a double holds exactly.
SHARDOPT_HD Doubles add_product(Doubles a, Doubles b, Doubles sum) { return a * b + sum; }
#endif

#if !defined(__AVX512F__)  // AVX-512 has registers for masks; elsewhere masks are vectors
using Mask = Ints;
SHARDOPT_HD Mask equal(Ints a, Ints b) { return a == b; }
SHARDOPT_HD Mask greater(Ints a, Ints b) { return a > b; }
SHARDOPT_HD Mask at_least(Ints a, Ints b) { return a >= b; }
SHARDOPT_HD Mask less(Ints a, Ints b) { return a < b; }
SHARDOPT_HD Mask greater(Floats a, Floats b) { return a > b; }
SHARDOPT_HD Mask less(Floats a, Floats b) { return a < b; }
SHARDOPT_HD Mask not_equal(Floats a, Floats b) { return a != b; }
#endif

}  // namespace native
SHARDOPT_END_NAMESPACE
