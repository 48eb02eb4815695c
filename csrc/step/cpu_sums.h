// Adds the squares or products of a run of floats to an exact sum on the CPU.
#pragma once

#include "core/exact_sum.h"
#include "step/cpu_passes.h"

SHARDOPT_BEGIN_NAMESPACE

constexpr int kHalf = kLanes / 2;  // doubles in a vector
typedef double Doubles __attribute__((vector_size(8 * kHalf)));
typedef uint64_t Longs __attribute__((vector_size(8 * kHalf)));  // unsigned: sums may wrap
typedef float HalfFloats __attribute__((vector_size(4 * kHalf)));

inline Doubles load_doubles(const float* x) {
  HalfFloats narrow;
  __builtin_memcpy(&narrow, x, sizeof narrow);
  return __builtin_convertvector(narrow, Doubles);
}

// Products below 2^top in magnitude, all multiples of 2^(top - kRounds * kWindowBits): each round adds up a window of
// their bits. kSquares: y is x. Out of line: inlined, GCC sends halves of vectors through memory.
template <bool kSquares, int kRounds>
__attribute__((noinline)) void add_windows(ExactSum& sum, const float* x, const float* y, int n, int top) {
  double rounder[kRounds];
  Longs count[kRounds] = {};
  for (int r = 0; r < kRounds; ++r) rounder[r] = rounder_of(top - r * kWindowBits);
  for (int i = 0; i < n; i += kHalf) {
    const Doubles wide = load_doubles(x + i);
    Doubles left = wide * (kSquares ? wide : load_doubles(y + i));
    for (int r = 0; r < kRounds; ++r) {
      const Doubles rounded = left + rounder[r];
      count[r] += (Longs)rounded;  // its bits
      left -= rounded - rounder[r];
    }
  }
  for (int r = 0; r < kRounds; ++r) {
    for (int lane = 0; lane < kHalf; ++lane) {
      const uint64_t none = static_cast<uint64_t>(n / kHalf) * static_cast<uint64_t>(bits(rounder[r]));
      add(sum, static_cast<int64_t>(count[r][lane] - none), top - (r + 1) * kWindowBits);
    }
  }
}

// Any floats, one pair after the other.
inline void add_slowly(ExactSum& sum, const float* x, const float* y, int n) {
  const auto mantissa = [](int32_t m) -> int64_t { return (m & 0x7fffff) | (m >> 23 ? 0x800000 : 0); };
  for (int i = 0; i < n; ++i) {
    const int32_t a = magnitude_bits(x[i]), b = magnitude_bits(y[i]);
    if (a >= kInfinityBits || b >= kInfinityBits) {
      sum.lost += lost_by(max_int(a, b));
    } else if (a && b) {
      const int64_t product = mantissa(a) * mantissa(b);
      const int exponent = max_int(a >> 23, 1) + max_int(b >> 23, 1) - 300;
      add(sum, (bits(x[i]) ^ bits(y[i])) < 0 ? -product : product, exponent);
    }
  }
}

// The least and the largest exponent of floats above zero, biased.
struct Exponents {
  int lowest, highest;
  bool any, finite;

  Exponents(const float* x, int n) {
    const Extremes found =
        extremes_of(x, n, [](LaneExtremes& e, auto some) { e.template add_unsigned<true>(magnitude(some)); });
    highest = max_int(found.high >> 23, 1);
    lowest = max_int((kInfinityBits - found.low) >> 23, 1);
    any = found.high != 0;
    finite = found.high < kInfinityBits;
  }
};

template <bool kSquares>
void add_exactly(ExactSum& sum, const float* x, const float* y, int n) {
  const Exponents of_x(x, n), of_y = kSquares ? of_x : Exponents(y, n);
  if (!of_x.finite || !of_y.finite) return add_slowly(sum, x, y, n);
  if (!of_x.any || !of_y.any) return;
  const int top = of_x.highest + of_y.highest - 252;
  const int lowest = of_x.lowest + of_y.lowest - 300, rounds = (top - lowest + kWindowBits - 1) / kWindowBits;
  if (rounds == 1) return add_windows<kSquares, 1>(sum, x, y, n, top);
  if (rounds == 2) return add_windows<kSquares, 2>(sum, x, y, n, top);
  if (rounds == 3) return add_windows<kSquares, 3>(sum, x, y, n, top);
  add_slowly(sum, x, y, n);
}

// n: a multiple of kEach.
inline void add_squares(ExactSum& sum, const float* x, int n) { add_exactly<true>(sum, x, x, n); }
inline void add_products(ExactSum& sum, const float* x, const float* y, int n) { add_exactly<false>(sum, x, y, n); }

SHARDOPT_END_NAMESPACE
