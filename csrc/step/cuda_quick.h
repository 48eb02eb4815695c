// Numbers whose square roots and reciprocals are computed without guards for unusual floats: by the instructions that
// nvcc generates for numbers which pass the guards.
#pragma once

#include "step/cuda_lane.h"

SHARDOPT_BEGIN_NAMESPACE

SHARDOPT_DEVICE float near_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
SHARDOPT_DEVICE float near_reciprocal_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Roots above this bound are normal numbers, and so are the residuals of their computation.
constexpr float kLeastQuickRoot = 0x1p-50f;
// Moments below this bound have scales whose reciprocals are normal numbers.
constexpr float kLargestQuickMoment = 0x1p120f;

// The larger of a and b; NaN if either is NaN.
SHARDOPT_DEVICE float larger(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float x;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
#else
  return a != a || a > b ? a : b;
#endif
}

// 1 for a root, 0 for zero.
SHARDOPT_DEVICE float one_above_zero(float root) { return __saturatef(root * 0x1p60f); }

// kZeros: square roots may be of zero, too.
template <bool kZeros>
struct QuickOf {
  using Quick = QuickOf;
  float x;

  QuickOf() = default;
  SHARDOPT_DEVICE QuickOf(float value) : x(value) {}

  friend SHARDOPT_DEVICE Quick operator+(Quick a, Quick b) { return a.x + b.x; }
  friend SHARDOPT_DEVICE Quick operator-(Quick a, Quick b) { return a.x - b.x; }
  friend SHARDOPT_DEVICE Quick operator*(Quick a, Quick b) { return a.x * b.x; }
  friend SHARDOPT_DEVICE Quick operator-(Quick a) { return -a.x; }
  friend SHARDOPT_DEVICE bool operator<(Quick a, Quick b) { return a.x < b.x; }
  friend SHARDOPT_DEVICE bool operator>(Quick a, Quick b) { return a.x > b.x; }
  friend SHARDOPT_DEVICE bool operator!=(Quick a, Quick b) { return a.x != b.x; }

  friend SHARDOPT_DEVICE int32_t bits(Quick a) { return shardopt::SHARDOPT_TARGET::bits(a.x); }
  friend SHARDOPT_DEVICE Quick magnitude(Quick a) { return fabsf(a.x); }
  friend SHARDOPT_DEVICE Quick select(bool condition, Quick yes, Quick no) { return condition ? yes.x : no.x; }
  friend SHARDOPT_DEVICE Quick fma(Quick a, Quick b, Quick c) { return shardopt::SHARDOPT_TARGET::fma(a.x, b.x, c.x); }

  // Correctly rounded if x and 1 / x are normal numbers.
  friend SHARDOPT_DEVICE Quick reciprocal(Quick a) {
    const float y = near_reciprocal(a.x);
    return __fmaf_rn(y, __fmaf_rn(-a.x, y, 1.0f), y);
  }

  // Correctly rounded from 2^-100 to 2^124; NaN for negative numbers, infinity and NaN, and without kZeros for zero.
  // The number added to the argument changes none from 2^-101 on.
  friend SHARDOPT_DEVICE Quick square_root(Quick a) {
    const float y = near_reciprocal_root(kZeros ? a.x + 0x1p-126f : a.x), s = a.x * y;
    return __fmaf_rn(__fmaf_rn(-s, s, a.x), 0.5f * y, s);
  }
};
using Quick = QuickOf<false>;

SHARDOPT_END_NAMESPACE
