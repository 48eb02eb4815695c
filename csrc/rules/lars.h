// LARS (You et al., arXiv 1708.03888, algorithm 1).
#pragma once

#include "core/rule.h"

SHARDOPT_BEGIN_NAMESPACE

struct Lars {
  static constexpr const char* kName = "lars";
  using Kept = Moments<MomentKind::kOwnUnits>;  // momentum includes the learning rates
  static constexpr const char* kHyper[] = {"lr", "momentum", "weight_decay", "trust_coefficient"};
  static constexpr int kSums = 2;  // squares of the weights; squares of the gradient

  float momentum, weight_decay, trust_coefficient;
  float lr;  // the learning rate times the local learning rate

  SHARDOPT_HD static Lars make(const double* hyper, double) {
    return {static_cast<float>(hyper[1]), static_cast<float>(hyper[2]), static_cast<float>(hyper[3]),
            static_cast<float>(hyper[0])};
  }

  SHARDOPT_HD void with_sums(const double* sums, double) {
    const double weight = square_root(sums[0]), gradient = square_root(sums[1]);
    const double ratio = trust_coefficient * weight / (gradient + weight_decay * weight);
    if (weight != 0.0 && gradient != 0.0) lr = static_cast<float>(lr * ratio);
  }

  template <class F>
  SHARDOPT_HD void terms(F param, F gradient, F*, F* x) const {
    x[0] = param;
    x[1] = gradient;
  }

  template <class F>
  SHARDOPT_HD void update(F& param, F gradient, F* moment, F*) const {
    moment[0] = fma(momentum, moment[0], lr * add_scaled(weight_decay, param, gradient));
    param = param - moment[0];
  }
};

SHARDOPT_END_NAMESPACE
