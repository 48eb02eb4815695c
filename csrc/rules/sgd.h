// Stochastic gradient descent, plain and with momentum as torch.optim.SGD defines it (Sutskever et al., ICML 2013).
#pragma once

#include "core/numeric.h"
#include "core/rule.h"

SHARDOPT_BEGIN_NAMESPACE

struct Sgd {
  static constexpr const char* kName = "sgd";
  using Kept = Moments<>;
  static constexpr const char* kHyper[] = {"lr", "coupled_decay"};

  float lr, coupled_decay;

  SHARDOPT_HD static Sgd make(const double* hyper, double) {
    return {static_cast<float>(hyper[0]), static_cast<float>(hyper[1])};
  }

  template <class F>
  SHARDOPT_HD void update(F& param, F gradient, F*, F*) const {
    param = fma(-lr, add_scaled(coupled_decay, param, gradient), param);
  }
};

struct Momentum {
  static constexpr const char* kName = "momentum";
  using Kept = Moments<MomentKind::kSigned>;
  static constexpr const char* kHyper[] = {"lr", "momentum", "dampening", "coupled_decay", "nesterov"};

  float lr, momentum, coupled_decay;
  float gradient_weight;  // 1 - dampening, but 1 in the first step, as in torch
  bool nesterov;

  SHARDOPT_HD static Momentum make(const double* hyper, double step) {
    Momentum rule;
    rule.lr = static_cast<float>(hyper[0]);
    rule.momentum = static_cast<float>(hyper[1]);
    rule.coupled_decay = static_cast<float>(hyper[3]);
    rule.gradient_weight = step <= 1.0 ? 1.0f : static_cast<float>(1.0 - hyper[2]);
    rule.nesterov = hyper[4] != 0.0;
    return rule;
  }

  template <class F>
  SHARDOPT_HD void update(F& param, F gradient, F* moment, F*) const {
    const F g = add_scaled(coupled_decay, param, gradient);
    const F buffer = fma(momentum, moment[0], gradient_weight * g);
    const F direction = nesterov ? fma(momentum, buffer, g) : buffer;
    param = fma(-lr, direction, param);
    moment[0] = buffer;
  }
};

SHARDOPT_END_NAMESPACE
