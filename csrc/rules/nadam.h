// NAdam (Dozat, ICLR workshop 2016): Nesterov's momentum, with a decay rate that rises to beta1.
#pragma once

#include "core/rule.h"

SHARDOPT_BEGIN_NAMESPACE

struct NAdam {
  static constexpr const char* kName = "nadam";
  using Kept = Moments<MomentKind::kSigned, MomentKind::kUnsigned>;
  // decay_base: 0.96 to the power of momentum_decay. past_product: product of the decay rates of the first past_steps
  // steps, which were taken with other values of beta1; they do not count for a parameter with fewer steps.
  static constexpr const char* kHyper[] = {
      "lr", "beta1", "beta2", "eps", "coupled_decay", "decoupled_decay", "decay_base", "past_steps", "past_product"};

  float one_minus_beta1, one_minus_beta2, eps, coupled_decay, decoupled_decay, inverse_root_correction2;
  float gradient_rate, moment_rate;

  SHARDOPT_HD static NAdam make(const double* hyper, double step) {
    const double lr = hyper[0], beta1 = hyper[1], beta2 = hyper[2];
    const double past = step > hyper[7] ? hyper[7] : 0.0;
    double product = past > 0.0 ? hyper[8] : 1.0, decay = power(hyper[6], past), mu = 0.0;
    for (int64_t i = static_cast<int64_t>(past) + 1; i <= static_cast<int64_t>(step) && product > 0x1p-60; ++i) {
      // once a product is at most 2^-60, 1 - product is 1
      decay *= hyper[6];
      mu = beta1 * (1.0 - 0.5 * decay);
      product *= mu;
    }
    mu = beta1 * (1.0 - 0.5 * power(hyper[6], step));
    const double next = beta1 * (1.0 - 0.5 * power(hyper[6], step + 1.0));
    NAdam rule;
    rule.one_minus_beta1 = static_cast<float>(1.0 - beta1);
    rule.one_minus_beta2 = static_cast<float>(1.0 - beta2);
    rule.eps = static_cast<float>(hyper[3]);
    rule.coupled_decay = static_cast<float>(hyper[4]);
    rule.decoupled_decay = static_cast<float>(lr * hyper[5]);
    rule.inverse_root_correction2 = static_cast<float>(1.0 / square_root(1.0 - power(beta2, step)));
    rule.gradient_rate = static_cast<float>(lr * (1.0 - mu) / (1.0 - product));
    rule.moment_rate = static_cast<float>(lr * next / (1.0 - product * next));
    return rule;
  }

  template <class F>
  SHARDOPT_HD void update(F& param, F gradient, F* moment, F* roots) const {
    const F g = add_scaled(coupled_decay, param, gradient);
    const F m = fma(one_minus_beta1, g - moment[0], moment[0]);
    const F v = fma(one_minus_beta2, fma(g, g, -moment[1]), moment[1]);
    roots[0] = square_root(v);
    const F denominator = fma(roots[0], inverse_root_correction2, eps);
    const F direction = fma(moment_rate, m, gradient_rate * g);
    param = fma(-direction, reciprocal(denominator), decayed(param, decoupled_decay));
    moment[0] = m;
    moment[1] = v;
  }
};

SHARDOPT_END_NAMESPACE
