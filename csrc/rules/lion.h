// Lion (Chen et al., arXiv 2302.06675, algorithm 2).
#pragma once

#include "core/numeric.h"
#include "core/rule.h"

SHARDOPT_BEGIN_NAMESPACE

struct Lion {
  static constexpr const char* kName = "lion";
  using Kept = Moments<MomentKind::kSigned>;
  static constexpr const char* kHyper[] = {"lr", "beta1", "beta2", "decoupled_decay"};

  float lr, one_minus_beta1, one_minus_beta2, decay;

  SHARDOPT_HD static Lion make(const double* hyper, double) {
    Lion rule;
    rule.lr = static_cast<float>(hyper[0]);
    rule.one_minus_beta1 = static_cast<float>(1.0 - hyper[1]);
    rule.one_minus_beta2 = static_cast<float>(1.0 - hyper[2]);
    rule.decay = static_cast<float>(hyper[0] * hyper[3]);
    return rule;
  }

  template <class F>
  SHARDOPT_HD void update(F& param, F gradient, F* moment, F*) const {
    const F difference = gradient - moment[0];
    const F direction = fma(one_minus_beta1, difference, moment[0]);
    const F down = select(direction < 0.0f, spread<F>(-lr), 0.0f * direction);
    const F step = select(direction > 0.0f, spread<F>(lr), down);
    param = decayed(param, decay) - step;
    moment[0] = fma(one_minus_beta2, difference, moment[0]);
  }
};

SHARDOPT_END_NAMESPACE
