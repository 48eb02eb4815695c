// Adan (Xie et al., arXiv 2208.06677, algorithm 1): Nesterov's momentum from differences of gradients.
#pragma once

#include "core/rule.h"

SHARDOPT_BEGIN_NAMESPACE

struct Adan {
  static constexpr const char* kName = "adan";
  // Averages of the gradient, of its differences and of squares; the last gradient, with its sign changed.
  using Kept = Moments<MomentKind::kSigned, MomentKind::kSigned, MomentKind::kUnsigned, MomentKind::kSigned>;
  static constexpr const char* kHyper[] = {"lr", "beta1", "beta2", "beta3", "eps", "weight_decay", "no_prox"};

  float one_minus_beta1, beta2, one_minus_beta2, one_minus_beta3, eps;
  float gradient_rate, difference_rate, inverse_root_correction3;
  float decay_before, decay_after;
  bool has_last;

  SHARDOPT_HD static Adan make(const double* hyper, double step) {
    const double lr = hyper[0], decay = lr * hyper[5];
    Adan rule;
    rule.one_minus_beta1 = static_cast<float>(1.0 - hyper[1]);
    rule.beta2 = static_cast<float>(hyper[2]);
    rule.one_minus_beta2 = static_cast<float>(1.0 - hyper[2]);
    rule.one_minus_beta3 = static_cast<float>(1.0 - hyper[3]);
    rule.eps = static_cast<float>(hyper[4]);
    rule.gradient_rate = static_cast<float>(lr / (1.0 - power(hyper[1], step)));
    rule.difference_rate = static_cast<float>(lr * hyper[2] / (1.0 - power(hyper[2], step)));
    rule.inverse_root_correction3 = static_cast<float>(1.0 / square_root(1.0 - power(hyper[3], step)));
    rule.decay_before = static_cast<float>(hyper[6] != 0.0 ? decay : 0.0);
    rule.decay_after = static_cast<float>(hyper[6] != 0.0 ? 0.0 : decay / (1.0 + decay));
    rule.has_last = step > 1.0;
    return rule;
  }

  // Bounds the factor of the gradient plus its difference from the last gradient.
  SHARDOPT_HD float gain() const { return 4.0f; }

  template <class F>
  SHARDOPT_HD void update(F& param, F gradient, F* moment, F* roots) const {
    const F g = gradient;
    const F difference = has_last ? g + moment[3] : F{};
    const F ahead = fma(beta2, difference, g);
    moment[0] = fma(one_minus_beta1, g - moment[0], moment[0]);
    moment[1] = fma(one_minus_beta2, difference - moment[1], moment[1]);
    moment[2] = fma(one_minus_beta3, fma(ahead, ahead, -moment[2]), moment[2]);
    moment[3] = -g;
    roots[0] = square_root(moment[2]);
    const F denominator = fma(roots[0], inverse_root_correction3, eps);
    const F direction = fma(difference_rate, moment[1], gradient_rate * moment[0]);
    const F stepped = fma(-direction, reciprocal(denominator), decayed(param, decay_before));
    param = decayed(stepped, decay_after);
  }
};

SHARDOPT_END_NAMESPACE
