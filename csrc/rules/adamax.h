// Adamax (Kingma & Ba, arXiv 1412.6980, algorithm 2): the largest gradient in place of the second moment.
#pragma once

#include "core/rule.h"

SHARDOPT_BEGIN_NAMESPACE

struct Adamax {
  static constexpr const char* kName = "adamax";
  using Kept = Moments<MomentKind::kSigned, MomentKind::kMagnitude>;
  static constexpr const char* kHyper[] = {"lr", "beta1", "beta2", "eps", "coupled_decay"};

  float one_minus_beta1, beta2, eps, coupled_decay, step_size;

  SHARDOPT_HD static Adamax make(const double* hyper, double step) {
    return {static_cast<float>(1.0 - hyper[1]), static_cast<float>(hyper[2]), static_cast<float>(hyper[3]),
            static_cast<float>(hyper[4]), static_cast<float>(hyper[0] / (1.0 - power(hyper[1], step)))};
  }

  template <class F>
  SHARDOPT_HD void update(F& param, F gradient, F* moment, F*) const {
    const F g = add_scaled(coupled_decay, param, gradient);
    const F m = fma(one_minus_beta1, g - moment[0], moment[0]);
    const F largest = max_float(beta2 * moment[1], magnitude(g) + eps);
    param = fma(-step_size, m * reciprocal(largest), param);
    moment[0] = m;
    moment[1] = largest;
  }
};

SHARDOPT_END_NAMESPACE
