// ADOPT (Taniguchi et al., arXiv 2411.02853, algorithm 2): the gradient is normalized by the second moment before it.
#pragma once

#include "core/rule.h"

SHARDOPT_BEGIN_NAMESPACE

struct Adopt {
  static constexpr const char* kName = "adopt";
  using Kept = Moments<MomentKind::kOwnUnits, MomentKind::kUnsigned>;
  static constexpr const char* kHyper[] = {"lr", "beta1", "beta2", "eps", "coupled_decay", "decoupled_decay"};

  float lr, one_minus_beta1, one_minus_beta2, eps, coupled_decay, decoupled_decay;
  float largest;  // bound of the normalized gradient: (t - 1)^(1/4)

  SHARDOPT_HD static Adopt make(const double* hyper, double step) {
    const bool is_first = step <= 1.0;  // the first step only makes the second moment
    Adopt rule;
    rule.lr = static_cast<float>(is_first ? 0.0 : hyper[0]);
    rule.one_minus_beta1 = static_cast<float>(1.0 - hyper[1]);
    rule.one_minus_beta2 = static_cast<float>(is_first ? 1.0 : 1.0 - hyper[2]);
    rule.eps = static_cast<float>(hyper[3]);
    rule.coupled_decay = static_cast<float>(hyper[4]);
    rule.decoupled_decay = static_cast<float>(is_first ? 0.0 : hyper[0] * hyper[5]);
    rule.largest = is_first ? 0.0f : static_cast<float>(square_root(square_root(step - 1.0)));
    return rule;
  }

  template <class F>
  SHARDOPT_HD void update(F& param, F gradient, F* moment, F* roots) const {
    const F g = add_scaled(coupled_decay, param, gradient);
    const F denominator = max_float(spread<F>(eps), square_root(moment[1]));
    const F normalized = g * reciprocal(denominator);
    const F clipped = max_float(spread<F>(-largest), min_float(spread<F>(largest), normalized));  // NaN stays
    moment[0] = fma(one_minus_beta1, clipped - moment[0], moment[0]);
    moment[1] = fma(one_minus_beta2, fma(g, g, -moment[1]), moment[1]);
    roots[0] = square_root(moment[1]);
    param = fma(-lr, moment[0], decayed(param, decoupled_decay));
  }
};

SHARDOPT_END_NAMESPACE
