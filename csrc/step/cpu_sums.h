// Adds the squares of a run of floats to an exact sum on the CPU.
#pragma once

#include "core/exact_sum.h"
#include "step/cpu_passes.h"

SHARDOPT_BEGIN_NAMESPACE

constexpr int kHalf = kLanes / 2;  // doubles in a vector
typedef double Doubles __attribute__((vector_size(8 * kHalf)));
typedef uint64_t Longs __attribute__((vector_size(8 * kHalf)));  // unsigned: sums may wrap
typedef float HalfFloats __attribute__((vector_size(4 * kHalf)));

// Squares below 2^top, all multiples of 2^(top - kRounds * kWindowBits): each round adds up a window of their bits.
template <int kRounds>
void add_squares(ExactSum& sum, const float* x, int n, int top) {
  double rounder[kRounds];
  Longs count[kRounds] = {};
  for (int r = 0; r < kRounds; ++r) rounder[r] = rounder_of(top - r * kWindowBits);
  for (int i = 0; i < n; i += kHalf) {
    HalfFloats narrow;
    __builtin_memcpy(&narrow, x + i, sizeof narrow);
    const Doubles wide = __builtin_convertvector(narrow, Doubles);
    Doubles left = wide * wide;
    for (int r = 0; r < kRounds; ++r) {
      const Doubles rounded = left + rounder[r];
      count[r] += reinterpret_cast<const Longs&>(rounded);
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

// Any floats, one after the other.
inline void add_squares_slowly(ExactSum& sum, const float* x, int n) {
  for (int i = 0; i < n; ++i) {
    const int32_t magnitude = magnitude_bits(x[i]);
    if (magnitude >= kInfinityBits) {
      ++sum.lost;
    } else if (magnitude) {
      const int exponent = max_int(magnitude >> 23, 1) - 150;
      const int64_t mantissa = (magnitude & 0x7fffff) | (magnitude >> 23 ? 0x800000 : 0);
      add(sum, mantissa * mantissa, 2 * exponent);
    }
  }
}

// n: a multiple of kEach.
inline void add_squares(ExactSum& sum, const float* x, int n) {
  const Extremes found =
      extremes_of(x, n, [](LaneExtremes& e, auto some) { e.template add_unsigned<true>(magnitude(some)); });
  if (found.high == 0) return;
  if (found.high >= kInfinityBits) return add_squares_slowly(sum, x, n);
  const int highest = max_int(found.high >> 23, 1);  // exponents, biased
  const int lowest = max_int((kInfinityBits - found.low) >> 23, 1);
  const int top = 2 * (highest - 126), rounds = (2 * (highest - lowest) + 48 + kWindowBits - 1) / kWindowBits;
  if (rounds == 1) return add_squares<1>(sum, x, n, top);
  if (rounds == 2) return add_squares<2>(sum, x, n, top);
  if (rounds == 3) return add_squares<3>(sum, x, n, top);
  add_squares_slowly(sum, x, n);
}

SHARDOPT_END_NAMESPACE
