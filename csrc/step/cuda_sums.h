// Adds squares and products to an exact sum on CUDA.
#pragma once

#include "core/exact_sum.h"
#include "step/cuda_lane.h"

SHARDOPT_BEGIN_NAMESPACE

// The value of the lane whose number differs in `lane_bits`. All lanes of the warp take part.
SHARDOPT_DEVICE int64_t exchange(int64_t x, int lane_bits) {
  const auto low = static_cast<uint32_t>(exchange(static_cast<int32_t>(x), lane_bits));
  return static_cast<int64_t>(exchange(static_cast<int32_t>(x >> 32), lane_bits)) * (int64_t{1} << 32) + low;
}

// The sum of all lanes' numbers, in each lane.
SHARDOPT_DEVICE int64_t warp_sum(int64_t x) {
#pragma unroll
  for (int lane_bit = 1; lane_bit < kWarp; lane_bit *= 2) x += exchange(x, lane_bit);
  return x;
}

SHARDOPT_DEVICE int32_t warp_max(int32_t x) {
#pragma unroll
  for (int lane_bit = 1; lane_bit < kWarp; lane_bit *= 2) x = max_int(x, exchange(x, lane_bit));
  return x;
}

// An exact sum that the lanes of a warp hold together, one word per lane.
class WarpSum {
  static constexpr int kWords = sizeof(ExactSum) / sizeof(int64_t);
  static_assert(kWords <= kWarp, "a word per lane");

 public:
  // Adds the squares of each lane's numbers. All lanes of the warp take part.
  SHARDOPT_DEVICE void add_squares(const float (&x)[kLane]) { add<true>(x, x); }

  // Adds the products of each lane's numbers. All lanes of the warp take part.
  SHARDOPT_DEVICE void add_products(const float (&x)[kLane], const float (&y)[kLane]) { add<false>(x, y); }

  // Adds the warp's sum to a sum in memory, atomically: other warps add to it, too. kCarries: carries from each digit
  // to the next, once.
  template <bool kCarries>
  SHARDOPT_DEVICE void add_to(ExactSum* sum) const {
    if (lane_ >= kWords || word_ == 0) return;
    const auto to = reinterpret_cast<unsigned long long*>(sum) + lane_;
    const bool carries = kCarries && lane_ < kSumDigits - 1;
    atomicAdd(to, static_cast<unsigned long long>(carries ? word_ & 0xffffffff : word_));
    if (carries && word_ >> kDigitBits) atomicAdd(to + 1, static_cast<unsigned long long>(word_ >> kDigitBits));
  }

 private:
  template <bool kSquares>
  SHARDOPT_DEVICE void add(const float (&x)[kLane], const float (&y)[kLane]) {
    double left[kLane];
    int32_t largest_x = 0, largest_y = 0;
    int64_t lost = 0;
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      const int32_t a = magnitude_bits(x[i]), b = magnitude_bits(y[i]);
      const bool is_finite = a < kInfinityBits && b < kInfinityBits;
      if (!is_finite) lost += lost_by(max_int(a, b));
      left[i] = is_finite ? static_cast<double>(x[i]) * static_cast<double>(y[i]) : 0.0;
      if (is_finite) largest_x = max_int(largest_x, a);
      if (is_finite) largest_y = max_int(largest_y, b);
    }
    if (warp_max(lost != 0)) {
      const int64_t count = warp_sum(lost);
      if (lane_ == kWords - 1) word_ += count;
    }
    largest_x = warp_max(largest_x);
    largest_y = kSquares ? largest_x : warp_max(largest_y);
    bool more = largest_x != 0 && largest_y != 0;
    for (int top = max_int(largest_x >> 23, 1) + max_int(largest_y >> 23, 1) - 252; more; top -= kWindowBits) {
      const double rounder = rounder_of(top);
      int64_t count = 0;
      int32_t rest = 0;
#pragma unroll
      for (int i = 0; i < kLane; ++i) {
        const double rounded = left[i] + rounder;
        count += bits(rounded) - bits(rounder);
        left[i] -= rounded - rounder;
        rest |= left[i] != 0.0;
      }
      add(warp_sum(count), top - kWindowBits);
      more = warp_max(rest) != 0;
    }
  }

  SHARDOPT_DEVICE void add(int64_t number, int exponent) {
    const DigitParts parts = digit_parts(number, exponent);
    const int which = lane_ - parts.first;
    word_ += which == 0 ? parts.part[0] : which == 1 ? parts.part[1] : which == 2 ? parts.part[2] : 0;
  }

  const int lane_ = static_cast<int>(threadIdx.x) % kWarp;
  int64_t word_ = 0;
};

SHARDOPT_END_NAMESPACE
