// Sums of squares or products over one parameter or all parameters, added up in whole numbers: the same bits in any
// order, on any number of threads and ranks. A product of two float32 is exact in double; its bits are added to digits
// with room for carries.
#pragma once

#include "core/call.h"
#include "core/numeric.h"

SHARDOPT_BEGIN_NAMESPACE

constexpr int kDigitBits = 32;
constexpr int kLowestBit = -384;                // digits[0] counts multiples of 2^-384. The least product is 2^-298
constexpr int kWindowBits = 51;                 // bits that one rounding takes: see rounder_of
constexpr int64_t kLostNaN = int64_t{1} << 32;  // added to `lost` for a NaN; an infinite term adds 1

SHARDOPT_HD int64_t bits(double x) {
#if defined(__CUDA_ARCH__)
  return __double_as_longlong(x);
#else
  int64_t b;
  __builtin_memcpy(&b, &x, sizeof b);
  return b;
#endif
}

SHARDOPT_HD double double_from_bits(int64_t b) {
#if defined(__CUDA_ARCH__)
  return __longlong_as_double(b);
#else
  double x;
  __builtin_memcpy(&x, &b, sizeof x);
  return x;
#endif
}

// 2^exponent, of a normal number.
SHARDOPT_HD double power_of_two(int exponent) { return double_from_bits(static_cast<int64_t>(1023 + exponent) << 52); }

// A whole number times 2^exponent, split into the parts to add to digits[first] and the two digits after it.
struct DigitParts {
  int first;
  int64_t part[3];
};

SHARDOPT_HD DigitParts digit_parts(int64_t number, int exponent) {
  const int place = exponent - kLowestBit, shift = place % kDigitBits;
  const int64_t mask = 0xffffffff;
  const int64_t low = (number & mask) << shift, high = (number >> kDigitBits) * (int64_t{1} << shift);
  return {place / kDigitBits, {low & mask, ((low >> kDigitBits) & mask) + (high & mask), high >> kDigitBits}};
}

// A number whose addition rounds any number of (-2^top, 2^top) to a multiple of 2^(top - kWindowBits). The bits of the
// result, less bits(rounder), count these multiples.
SHARDOPT_HD double rounder_of(int top) { return 1.5 * power_of_two(top - kWindowBits + 52); }

SHARDOPT_HD void add(ExactSum& sum, int64_t number, int exponent) {
  const DigitParts parts = digit_parts(number, exponent);
  for (int i = 0; i < 3; ++i) sum.digits[parts.first + i] += parts.part[i];
}

// Carries from each digit to the next one, once: sums of many parameters have room for all of them.
SHARDOPT_HD void carry_once(ExactSum& sum) {
  int64_t carried = 0;
  for (int i = 0; i < kSumDigits; ++i) {
    const int64_t digit = sum.digits[i];
    const bool is_last = i == kSumDigits - 1;
    sum.digits[i] = (is_last ? digit : digit & 0xffffffff) + carried;
    carried = digit >> kDigitBits;
  }
}

// The number to add to `lost` for a term that is NaN or infinite.
SHARDOPT_HD int64_t lost_by(int32_t magnitude) { return magnitude > kInfinityBits ? kLostNaN : 1; }

// The first 64 bits of a sum, as sign * window * 2^exponent, and whether any lower bit is set.
struct Leading {
  double sign;
  uint64_t window;  // 0 for a sum of zero, else from 2^63 on
  bool has_more;
  int exponent;
};

SHARDOPT_HD Leading leading_of(const ExactSum& sum) {
  uint32_t digits[kSumDigits + 2] = {};  // two zeros first
  int top = 0;
  int64_t carry = 0;
  for (int i = 0; i < kSumDigits; ++i) {
    const int64_t digit = sum.digits[i] + carry;
    digits[i + 2] = static_cast<uint32_t>(digit);
    carry = digit >> kDigitBits;
    if (digits[i + 2] != 0) top = i + 2;
  }
  const double sign = carry < 0 ? -1.0 : 1.0;
  if (carry < 0) {  // below zero, as a two's complement
    top = 0;
    carry = 1;
    for (int i = 2; i < kSumDigits + 2; ++i) {
      carry += static_cast<uint32_t>(~digits[i]);
      digits[i] = static_cast<uint32_t>(carry);
      carry >>= kDigitBits;
      if (digits[i] != 0) top = i;
    }
  }
  if (top == 0) return {0.0, 0, false, 0};
  uint64_t window = static_cast<uint64_t>(digits[top]) << kDigitBits | digits[top - 1];
  uint32_t next = digits[top - 2];
  int exponent = (top - 3) * kDigitBits + kLowestBit;
  for (; window >> 63 == 0; window = window << 1 | next >> 31, next <<= 1) --exponent;
  bool has_more = next != 0;
  for (int i = 0; i < top - 2; ++i) has_more = has_more || digits[i] != 0;
  return {sign, window, has_more, exponent};
}

// The sum, rounded once to the nearest double; NaN if a term was NaN or infinite.
SHARDOPT_HD double value_of(const ExactSum& sum) {
  if (sum.lost != 0) return static_cast<double>(float_from_bits(0x7fc00000));
  const Leading first = leading_of(sum);
  if (first.window == 0) return 0.0;
  return first.sign * static_cast<double>(first.window | static_cast<uint64_t>(first.has_more)) *
         power_of_two(first.exponent);
}

// The root of a sum of squares, rounded once to the nearest float32; infinite or NaN if a term was infinite or NaN.
SHARDOPT_HD float root_of(const ExactSum& sum) {
  if (sum.lost != 0) return float_from_bits(sum.lost >= kLostNaN ? 0x7fc00000 : kInfinityBits);
  const Leading first = leading_of(sum);
  if (first.window == 0) return 0.0f;
  const int dropped = first.exponent % 2 == 0 ? 2 : 1;  // bits, so that the exponent becomes even
  const uint64_t square = first.window >> dropped;
  uint64_t root = 0;
  for (uint64_t bit = uint64_t{1} << 31; bit != 0; bit >>= 1) {
    if ((root | bit) * (root | bit) <= square) root |= bit;
  }
  // The root has at least 31 bits, and float32 keeps 24. Lower bits only decide a tie, so that the last bit, set,
  // stands for all of them.
  const bool has_more = first.has_more || root * root != square || square << dropped != first.window;
  const auto odd = static_cast<double>(root | static_cast<uint64_t>(has_more));
  return static_cast<float>(odd * power_of_two((first.exponent + dropped) / 2));
}

SHARDOPT_END_NAMESPACE
