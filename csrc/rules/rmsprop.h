// RMSprop as torch.optim.RMSprop defines it (Tieleman & Hinton, Coursera lecture 6.5, 2012), plain, centered (Graves,
// arXiv 1308.0850), and with momentum.
#pragma once

#include "core/rule.h"

SHARDOPT_BEGIN_NAMESPACE

namespace rmsprop {

constexpr const char* kNames[2][2] = {{"rmsprop", "rmsprop_momentum"},
                                      {"centered_rmsprop", "centered_rmsprop_momentum"}};

template <bool kCentered, bool kMomentum>
struct KeptMoments {
  using Kept = Moments<MomentKind::kUnsigned>;
};
template <>
struct KeptMoments<true, false> {
  using Kept = Moments<MomentKind::kUnsigned, MomentKind::kSigned>;
};
template <>
struct KeptMoments<false, true> {
  using Kept = Moments<MomentKind::kUnsigned, MomentKind::kOwnUnits>;
};
template <>
struct KeptMoments<true, true> {
  using Kept = Moments<MomentKind::kUnsigned, MomentKind::kSigned, MomentKind::kOwnUnits>;
};

}  // namespace rmsprop

template <bool kCentered, bool kMomentum>
struct RmsProp {
  static constexpr const char* kName = rmsprop::kNames[kCentered][kMomentum];
  using Kept = typename rmsprop::KeptMoments<kCentered, kMomentum>::Kept;
  static constexpr const char* kHyper[] = {"lr", "alpha", "eps", "coupled_decay", "momentum", "least_variance"};

  float lr, one_minus_alpha, eps, coupled_decay, momentum;
  float least_variance;  // least variance over the mean square

  SHARDOPT_HD static RmsProp make(const double* hyper, double) {
    return {static_cast<float>(hyper[0]), static_cast<float>(1.0 - hyper[1]), static_cast<float>(hyper[2]),
            static_cast<float>(hyper[3]), static_cast<float>(hyper[4]),       static_cast<float>(hyper[5])};
  }

  template <class F>
  SHARDOPT_HD void update(F& param, F gradient, F* moment, F* roots) const {
    const F g = add_scaled(coupled_decay, param, gradient);
    const F v = fma(one_minus_alpha, fma(g, g, -moment[0]), moment[0]);
    const F root = square_root(v);
    F deviation = root;
    if constexpr (kCentered) {
      moment[1] = fma(one_minus_alpha, g - moment[1], moment[1]);
      // The variance is a difference of two coded averages: their rounding errors must not bring it near zero.
      const F variance = max_float(fma(-moment[1], moment[1], v), least_variance * v);
      deviation = square_root(variance);
    }
    const F step = g * reciprocal(deviation + eps);
    if constexpr (kMomentum) {
      constexpr int kBuffer = 1 + kCentered;
      moment[kBuffer] = fma(momentum, moment[kBuffer], step);
      param = fma(-lr, moment[kBuffer], param);
    } else {
      param = fma(-lr, step, param);
    }
    moment[0] = v;
    roots[0] = root;
  }
};

SHARDOPT_END_NAMESPACE
