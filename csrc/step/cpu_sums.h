// Adds the squares or products of a run of floats to an exact sum on the CPU.
#pragma once

#include "core/exact_sum.h"
#include "step/cpu_passes.h"

SHARDOPT_BEGIN_NAMESPACE

constexpr int kHalf = kLanes / 2;  // doubles in a vector
using Doubles = native::Doubles;
typedef uint64_t Longs __attribute__((vector_size(8 * kHalf)));  // unsigned: sums may wrap

// The bits that a double has left for one term if 2 * kHalf doubles add up n terms.
inline int window_bits(int n) {
  int room = 0;
  while ((kLanes << room) < n) ++room;
  return 51 - room;
}

// Adds products below 2^top in magnitude, all multiples of 2^(top - kRounds * window). Each round's totals are doubles
// of one exponent, whose last bit is 2^window below the round's largest terms. Adding a term rounds the term to that
// bit; the remainder, exact in a double, goes to the next round. kSquares: y is x. ahead: memory to prefetch, which is
// read next. Out of line: if this is inlined, GCC sends halves of vectors through memory.
template <bool kSquares, int kRounds>
__attribute__((noinline)) void add_windows(ExactSum& sum, const float* x, const float* y, int n, int top, int window,
                                           const char* ahead) {
  Doubles total[kRounds][2];
  double zero[kRounds];
  for (int r = 0; r < kRounds; ++r) {
    zero[r] = 1.5 * power_of_two(top - (r + 1) * window + 52);
    total[r][0] = total[r][1] = Doubles{} + zero[r];
  }
  for (int i = 0; i < n; i += 2 * kHalf) {
    __builtin_prefetch(ahead + sizeof(float) * static_cast<unsigned>(i));
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const int at = i + half * kHalf;
      const Doubles a = native::load_doubles(x + at), b = kSquares ? a : native::load_doubles(y + at);
      Doubles next = native::add_product(a, b, total[0][half]);
      if (kRounds == 1) {
        total[0][half] = next;
        continue;
      }
      Doubles left = native::add_product(a, b, total[0][half] - next);
      total[0][half] = next;
#pragma GCC unroll 4
      for (int r = 1; r < kRounds - 1; ++r) {
        next = total[r][half] + left;
        left += total[r][half] - next;
        total[r][half] = next;
      }
      total[kRounds - 1][half] += left;
    }
  }
  for (int r = 0; r < kRounds; ++r) {
    const Longs counts = (Longs)total[r][0] + (Longs)total[r][1];  // counts, plus the bits of two zeros
    uint64_t count = 0;
    for (int lane = 0; lane < kHalf; ++lane) count += counts[lane] - 2 * static_cast<uint64_t>(bits(zero[r]));
    add(sum, static_cast<int64_t>(count), top - (r + 1) * window);
  }
}

// Adds the products of any floats, one pair after the other.
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

// zeros: number of low bits that are zero in every mantissa.
template <bool kSquares>
void add_exactly(ExactSum& sum, const float* x, const float* y, int n, int zeros, const char* ahead) {
  const Exponents of_x(x, n), of_y = kSquares ? of_x : Exponents(y, n);
  if (!of_x.finite || !of_y.finite) return add_slowly(sum, x, y, n);
  if (!of_x.any || !of_y.any) return;
  const int top = of_x.highest + of_y.highest - 252, window = window_bits(n);
  const int lowest = of_x.lowest + of_y.lowest - 300 + 2 * zeros;
  switch ((top - lowest + window - 1) / window) {
    case 1:
      return add_windows<kSquares, 1>(sum, x, y, n, top, window, ahead);
    case 2:
      return add_windows<kSquares, 2>(sum, x, y, n, top, window, ahead);
    case 3:
      return add_windows<kSquares, 3>(sum, x, y, n, top, window, ahead);
    case 4:
      return add_windows<kSquares, 4>(sum, x, y, n, top, window, ahead);
    default:
      add_slowly(sum, x, y, n);
  }
}

// n: a multiple of kEach. zeros: as in add_exactly. ahead: as in add_windows.
inline void add_squares(ExactSum& sum, const float* x, int n, int zeros, const char* ahead) {
  add_exactly<true>(sum, x, x, n, zeros, ahead);
}
inline void add_squares(ExactSum& sum, const float* x, int n) {
  add_squares(sum, x, n, 0, reinterpret_cast<const char*>(x));
}
inline void add_products(ExactSum& sum, const float* x, const float* y, int n) {
  add_exactly<false>(sum, x, y, n, 0, reinterpret_cast<const char*>(x));
}

SHARDOPT_END_NAMESPACE
