// Prodigy (Mishchenko & Defazio, arXiv 2306.06101, algorithm 4): Adam whose step size is an estimate of the distance to
// the solution.
#pragma once

#include "core/rule.h"

SHARDOPT_BEGIN_NAMESPACE

struct Prodigy {
  static constexpr const char* kName = "prodigy";
  using Kept = Moments<MomentKind::kSigned, MomentKind::kUnsigned, MomentKind::kWide, MomentKind::kExact>;
  // d: the estimate before the step. eps: times the estimate after it. safeguard_warmup: 0 or 1.
  static constexpr const char* kHyper[] = {"lr",  "beta1",           "beta2",           "beta3",
                                           "eps", "coupled_decay",   "decoupled_decay", "d",
                                           "d0",  "bias_correction", "safeguard_warmup"};
  static constexpr int kSums = 2;  // the gradient times the way back to the first weights; |s|
  static constexpr bool kProducts = true;
  static constexpr bool kTotals = true;

  // The rates are 0 for lr = 0: such parameters and their state stay as they are.
  float one_minus_beta1, one_minus_beta2, one_minus_beta3, eps, coupled_decay, decoupled_decay;
  float d, slow_rate, step_size;
  float first;  // 1 in the first step, 0 afterwards

  SHARDOPT_HD static Prodigy make(const double* hyper, double step) {
    const double lr = hyper[0], d = hyper[7], step_size = lr * d * hyper[9];
    const double takes_part = lr != 0.0 ? 1.0 : 0.0;
    Prodigy rule;
    rule.one_minus_beta1 = static_cast<float>(takes_part * (1.0 - hyper[1]));
    rule.one_minus_beta2 = static_cast<float>(takes_part * (1.0 - hyper[2]));
    rule.one_minus_beta3 = static_cast<float>(takes_part * (1.0 - hyper[3]));
    rule.eps = static_cast<float>(hyper[4]);
    rule.coupled_decay = static_cast<float>(hyper[5]);
    rule.decoupled_decay = static_cast<float>(step_size * hyper[6]);
    rule.d = static_cast<float>(takes_part * d);
    rule.slow_rate = static_cast<float>(d / hyper[8] * (hyper[10] != 0.0 ? takes_part * d : step_size));
    rule.step_size = static_cast<float>(step_size);
    rule.first = step == 1.0 ? 1.0f : 0.0f;
    return rule;
  }

  SHARDOPT_HD float gain() const { return d > 1.0f ? d : 1.0f; }

  template <class F>
  SHARDOPT_HD void terms(F param, F gradient, F* moment, F* x, F* y) const {
    const F g = average(param, gradient, moment), zero = spread<F>(0.0f);
    const auto takes_part = spread<F>(d) != 0.0f;
    x[0] = select(takes_part, g, zero);
    y[0] = moment[3] - param;
    x[1] = select(takes_part, magnitude(moment[2]), zero);
    y[1] = spread<F>(1.0f);
  }

  template <class F>
  SHARDOPT_HD void update(F& param, F gradient, F* moment, F* roots) const {
    average(param, gradient, moment);
    roots[0] = square_root(moment[1]);
    param = add_scaled(-step_size, moment[0] * reciprocal(roots[0] + eps), decayed(param, decoupled_decay));
  }

 private:
  // Takes the gradient into the averages, and returns it with the coupled decay.
  template <class F>
  SHARDOPT_HD F average(F param, F gradient, F* moment) const {
    const F g = add_scaled(coupled_decay, param, gradient), scaled = d * g;
    moment[0] = add_scaled(one_minus_beta1, scaled - moment[0], moment[0]);
    moment[1] = add_scaled(one_minus_beta2, fma(scaled, scaled, -moment[1]), moment[1]);
    moment[2] = add_scaled(slow_rate, g, add_scaled(-one_minus_beta3, moment[2], moment[2]));
    moment[3] = select(spread<F>(first) != 0.0f, param, moment[3]);
    return g;
  }
};

SHARDOPT_END_NAMESPACE
