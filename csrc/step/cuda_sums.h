// Adds squares to an exact sum on CUDA.
#pragma once

#include "core/exact_sum.h"
#include "step/cuda_lane.h"

SHARDOPT_BEGIN_NAMESPACE

// The value of the lane whose number differs in these bits. All lanes of the warp take part.
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

// An exact sum that the lanes of a warp hold together: each has one of its words.
class WarpSum {
  static constexpr int kWords = sizeof(ExactSum) / sizeof(int64_t);
  static_assert(kWords <= kWarp, "a word per lane");

 public:
  // Adds the squares of each lane's numbers. All lanes of the warp take part.
  SHARDOPT_DEVICE void add_squares(const float (&x)[kLane]) {
    double left[kLane];
    int32_t largest = 0, lost = 0;
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      const bool is_finite = magnitude_bits(x[i]) < kInfinityBits;
      lost += !is_finite;
      left[i] = is_finite ? static_cast<double>(x[i]) * static_cast<double>(x[i]) : 0.0;
      if (is_finite) largest = max_int(largest, magnitude_bits(x[i]));
    }
    if (warp_max(lost)) {
      const int64_t count = warp_sum(lost);
      if (lane_ == kWords - 1) word_ += count;
    }
    largest = warp_max(largest);
    int32_t more = largest;
    for (int top = 2 * (max_int(largest >> 23, 1) - 126); more; top -= kWindowBits) {
      const double rounder = rounder_of(top);
      int64_t count = 0;
      more = 0;
#pragma unroll
      for (int i = 0; i < kLane; ++i) {
        const double rounded = left[i] + rounder;
        count += bits(rounded) - bits(rounder);
        left[i] -= rounded - rounder;
        more |= left[i] != 0.0;
      }
      add(warp_sum(count), top - kWindowBits);
      more = warp_max(more);
    }
  }

  // Other warps add theirs.
  SHARDOPT_DEVICE void add_to(ExactSum* sum) const {
    if (lane_ >= kWords || word_ == 0) return;
    atomicAdd(reinterpret_cast<unsigned long long*>(sum) + lane_, static_cast<unsigned long long>(word_));
  }

 private:
  SHARDOPT_DEVICE void add(int64_t number, int exponent) {
    const DigitParts parts = digit_parts(number, exponent);
    const int which = lane_ - parts.first;
    word_ += which == 0 ? parts.part[0] : which == 1 ? parts.part[1] : which == 2 ? parts.part[2] : 0;
  }

  const int lane_ = static_cast<int>(threadIdx.x) % kWarp;
  int64_t word_ = 0;
};

SHARDOPT_END_NAMESPACE
