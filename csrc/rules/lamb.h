// LAMB (You et al., arXiv 1904.00962, algorithm 2), with phi(x) = x.
#pragma once

#include "core/rule.h"

SHARDOPT_BEGIN_NAMESPACE

struct Lamb {
  static constexpr const char* kName = "lamb";
  using Kept = Moments<MomentKind::kSigned, MomentKind::kUnsigned>;
  static constexpr const char* kHyper[] = {"lr", "beta1", "beta2", "eps", "weight_decay"};
  static constexpr int kSums = 2;  // squares of the weights; squares of the direction

  float one_minus_beta1, one_minus_beta2, eps, weight_decay, inverse_correction1, inverse_root_correction2;
  float lr;  // the learning rate times the trust ratio

  SHARDOPT_HD static Lamb make(const double* hyper, double step) {
    const double beta1 = hyper[1], beta2 = hyper[2];
    Lamb rule;
    rule.one_minus_beta1 = static_cast<float>(1.0 - beta1);
    rule.one_minus_beta2 = static_cast<float>(1.0 - beta2);
    rule.eps = static_cast<float>(hyper[3]);
    rule.weight_decay = static_cast<float>(hyper[4]);
    rule.inverse_correction1 = static_cast<float>(1.0 / (1.0 - power(beta1, step)));
    rule.inverse_root_correction2 = static_cast<float>(1.0 / square_root(1.0 - power(beta2, step)));
    rule.lr = static_cast<float>(hyper[0]);
    return rule;
  }

  SHARDOPT_HD void with_sums(const double* sums, double) {
    const double ratio = square_root(sums[0]) / square_root(sums[1]);
    if (sums[0] != 0.0 && sums[1] != 0.0) lr = static_cast<float>(lr * ratio);
  }

  template <class F>
  SHARDOPT_HD void terms(F param, F gradient, F* moment, F* x) const {
    F root;
    x[0] = param;
    x[1] = direction(param, gradient, moment, &root);
  }

  template <class F>
  SHARDOPT_HD void update(F& param, F gradient, F* moment, F* roots) const {
    param = fma(-lr, direction(param, gradient, moment, roots), param);
  }

 private:
  template <class F>
  SHARDOPT_HD F direction(F param, F gradient, F* moment, F* roots) const {
    moment[0] = fma(one_minus_beta1, gradient - moment[0], moment[0]);
    moment[1] = fma(one_minus_beta2, fma(gradient, gradient, -moment[1]), moment[1]);
    roots[0] = square_root(moment[1]);
    const F denominator = fma(roots[0], inverse_root_correction2, eps);
    const F scaled = inverse_correction1 * moment[0] * reciprocal(denominator);
    // One element of 0 / 0 would make the norm NaN, and with the norm the parameter.
    return add_scaled(weight_decay, param, select(denominator < 0x1p-126f, spread<F>(0.0f), scaled));
  }
};

SHARDOPT_END_NAMESPACE
