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
// their bits. product(i): of the elements from i on.
template <int kRounds, class Product>
void add_windows(ExactSum& sum, int n, int top, Product product) {
  double rounder[kRounds];
  Longs count[kRounds] = {};
  for (int r = 0; r < kRounds; ++r) rounder[r] = rounder_of(top - r * kWindowBits);
  for (int i = 0; i < n; i += kHalf) {
    Doubles left = product(i);
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

// Any two floats.
inline void add_product_slowly(ExactSum& sum, float x, float y) {
  const int32_t a = magnitude_bits(x), b = magnitude_bits(y);
  if (a >= kInfinityBits || b >= kInfinityBits) {
    ++sum.lost;
  } else if (a && b) {
    const auto mantissa = [](int32_t m) -> int64_t { return (m & 0x7fffff) | (m >> 23 ? 0x800000 : 0); };
    const int exponent = max_int(a >> 23, 1) + max_int(b >> 23, 1) - 300;
    const int64_t product = mantissa(a) * mantissa(b);
    add(sum, (bits(x) ^ bits(y)) < 0 ? -product : product, exponent);
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

// Products of floats with these exponents. slowly(): adds them one after the other.
template <class Product, class Slowly>
void add_exactly(ExactSum& sum, const Exponents& x, const Exponents& y, int n, Product product, Slowly slowly) {
  if (!x.finite || !y.finite) return slowly();
  if (!x.any || !y.any) return;
  const int top = x.highest + y.highest - 252, spread = (x.highest - x.lowest) + (y.highest - y.lowest);
  const int rounds = (spread + 48 + kWindowBits - 1) / kWindowBits;
  if (rounds == 1) return add_windows<1>(sum, n, top, product);
  if (rounds == 2) return add_windows<2>(sum, n, top, product);
  if (rounds == 3) return add_windows<3>(sum, n, top, product);
  slowly();
}

// n: a multiple of kEach.
inline void add_squares(ExactSum& sum, const float* x, int n) {
  const auto square = [x](int i) {
    const Doubles wide = load_doubles(x + i);
    return wide * wide;
  };
  const auto slowly = [&] {
    for (int i = 0; i < n; ++i) add_product_slowly(sum, x[i], x[i]);
  };
  const Exponents of(x, n);
  add_exactly(sum, of, of, n, square, slowly);
}

// The same of x[i] * y[i].
inline void add_products(ExactSum& sum, const float* x, const float* y, int n) {
  const auto product = [x, y](int i) { return load_doubles(x + i) * load_doubles(y + i); };
  const auto slowly = [&] {
    for (int i = 0; i < n; ++i) add_product_slowly(sum, x[i], y[i]);
  };
  add_exactly(sum, Exponents(x, n), Exponents(y, n), n, product, slowly);
}

SHARDOPT_END_NAMESPACE
