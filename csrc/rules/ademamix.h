// AdEMAMix (Pagliardini et al., arXiv 2409.03137, algorithm 1): a fast and a slow average of gradients.
#pragma once

#include "core/rule.h"

SHARDOPT_BEGIN_NAMESPACE

struct AdEMAMix {
  static constexpr const char* kName = "ademamix";
  using Kept = Moments<MomentKind::kSigned, MomentKind::kWide, MomentKind::kUnsigned>;
  // alpha_steps, beta3_steps: lengths of the warm-ups, 0 for none. log_beta1, log_beta3: natural logarithms.
  static constexpr const char* kHyper[] = {"lr",          "beta1",     "beta2",           "beta3",
                                           "eps",         "alpha",     "decoupled_decay", "alpha_steps",
                                           "beta3_steps", "log_beta1", "log_beta3"};

  float one_minus_beta1, one_minus_beta2, one_minus_beta3, eps, decoupled_decay;
  float fast_rate, slow_rate, inverse_root_correction2;

  SHARDOPT_HD static AdEMAMix make(const double* hyper, double step) {
    const double lr = hyper[0];
    double alpha = hyper[5], beta3 = hyper[3];
    if (step < hyper[7]) alpha *= step / hyper[7];
    if (step < hyper[8]) {  // the reciprocal of the logarithm, which is the average's length, grows linearly
      const double done = step / hyper[8];
      beta3 = exponential(1.0 / ((1.0 - done) / hyper[9] + done / hyper[10]));
      if (beta3 > hyper[3]) beta3 = hyper[3];
    }
    AdEMAMix rule;
    rule.one_minus_beta1 = static_cast<float>(1.0 - hyper[1]);
    rule.one_minus_beta2 = static_cast<float>(1.0 - hyper[2]);
    rule.one_minus_beta3 = static_cast<float>(1.0 - beta3);
    rule.eps = static_cast<float>(hyper[4]);
    rule.decoupled_decay = static_cast<float>(lr * hyper[6]);
    rule.fast_rate = static_cast<float>(lr / (1.0 - power(hyper[1], step)));
    rule.slow_rate = static_cast<float>(lr * alpha);
    rule.inverse_root_correction2 = static_cast<float>(1.0 / square_root(1.0 - power(hyper[2], step)));
    return rule;
  }

  template <class F>
  SHARDOPT_HD void update(F& param, F gradient, F* moment, F* roots) const {
    const F g = gradient;
    moment[0] = fma(one_minus_beta1, g - moment[0], moment[0]);
    moment[1] = fma(one_minus_beta3, g - moment[1], moment[1]);
    moment[2] = fma(one_minus_beta2, fma(g, g, -moment[2]), moment[2]);
    roots[0] = square_root(moment[2]);
    const F denominator = fma(roots[0], inverse_root_correction2, eps);
    const F direction = fma(slow_rate, moment[1], fast_rate * moment[0]);
    param = param - add_scaled(decoupled_decay, param, direction * reciprocal(denominator));
  }
};

SHARDOPT_END_NAMESPACE
