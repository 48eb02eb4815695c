// Helpers for rules, and how a rule declares its moments.
//
// A rule is a struct of the step's float32 scalars with
//   kName, kHyper      its name and the names of its hyper-parameters, in the order of `make`
//   Kept               the moments it keeps, in the order of `moment`: at most one unsigned
//   make(hyper, step)  the scalars, computed once per step in double from operations that round alike everywhere
//   update(...)        the mathematics of one element. `root` receives the square root of the unsigned moment, if any
//   root_limit()       of a rule with an unsigned moment: see Adam
// and knows nothing of codecs, devices or shards.
#pragma once

#include "core/numeric.h"

SHARDOPT_BEGIN_NAMESPACE

enum class MomentKind { kSigned, kUnsigned };

// base^exponent for whole exponents >= 0, by squaring: the same bits on every device, which libm's pow does not
// promise.
SHARDOPT_HD double power(double base, double exponent) {
  double result = 1.0;
  for (int64_t n = static_cast<int64_t>(exponent); n > 0; n >>= 1) {
    if (n & 1) result *= base;
    base *= base;
  }
  return result;
}

SHARDOPT_HD double square_root(double x) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(x);
#else
  return __builtin_sqrt(x);
#endif
}

// Below this magnitude, 2^63, no gradient overflows the moments: its square is finite, and moments are averages.
constexpr int32_t kLargeGradientBits = (127 + 63) << 23;

// Whether an update is to be undone because its gradient is NaN or Inf, or so large that the update overflows: bool, or
// a mask of lanes.
template <int kMoments, class F>
SHARDOPT_HD auto is_lost(F gradient, F new_param, const F* new_moments) {
  auto worst = max_int(magnitude_bits(gradient), magnitude_bits(new_param));
  for (int k = 0; k < kMoments; ++k) worst = max_int(worst, magnitude_bits(new_moments[k]));
  return select(magnitude_bits(gradient) >= kLargeGradientBits, worst, worst & 0) >= kInfinityBits;
}

// fma(factor, x, y), but y, its very bits, where the factor is zero: a factor that is switched off touches nothing,
// not even -0 or an infinite x.
template <class F>
SHARDOPT_HD F add_scaled(float factor, F x, F y) {
  return select(spread<F>(factor) != 0.0f, fma(factor, x, y), y);
}

// Decoupled weight decay of a parameter. Not param * (1 - decay): that factor's rounding would be a bias of
// some percent of a small decay.
template <class F>
SHARDOPT_HD F decayed(F param, float decay) {
  return add_scaled(-decay, param, param);
}

// The kinds of a rule's moments, in the order of `moment`.
template <MomentKind... kinds>
struct Moments {
  static constexpr int kCount = sizeof...(kinds);

  // The unsigned (second) moment that the signed ones stand beside, or -1.
  static constexpr int kUnsigned = [] {
    const MomentKind all[] = {kinds..., MomentKind::kSigned};
    int found = -1;
    for (int k = 0; k < kCount; ++k) {
      if (all[k] == MomentKind::kUnsigned) found = k;
    }
    return found;
  }();
};

SHARDOPT_END_NAMESPACE
