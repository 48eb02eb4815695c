// RAdam (Liu et al., arXiv 1908.03265, algorithm 2): no second moment before its variance is known.
#pragma once

#include "rules/adam.h"

SHARDOPT_BEGIN_NAMESPACE

struct RAdam : Adam {
  static constexpr const char* kName = "radam";

  float root_weight, floor;  // denominator: root * root_weight + floor, which is 1 if the variance is not known

  SHARDOPT_HD static RAdam make(const double* hyper, double step) {
    RAdam rule{Adam::make(hyper, step), 0.0f, 1.0f};
    const double beta2_power = power(hyper[2], step), longest = 2.0 / (1.0 - hyper[2]) - 1.0;
    const double length = longest - 2.0 * step * beta2_power / (1.0 - beta2_power);
    if (length > 5.0) {
      const double above = (length - 4.0) * (length - 2.0) * longest;
      const double below = (longest - 4.0) * (longest - 2.0) * length;
      const double rectified = square_root(above / below) * square_root(1.0 - beta2_power);
      rule.step_size = static_cast<float>(hyper[0] / (1.0 - power(hyper[1], step)) * rectified);
      rule.root_weight = 1.0f;
      rule.floor = rule.eps;
    }
    return rule;
  }

  template <class F>
  SHARDOPT_HD void update(F& param, F gradient, F* moment, F* roots) const {
    const F g = add_scaled(coupled_decay, param, gradient);
    const F m = fma(one_minus_beta1, g - moment[0], moment[0]);
    const F v = fma(one_minus_beta2, fma(g, g, -moment[1]), moment[1]);
    roots[0] = square_root(v);
    const F denominator = fma(roots[0], root_weight, floor);
    param = fma(-step_size, m * reciprocal(denominator), decayed(param, decoupled_decay));
    moment[0] = m;
    moment[1] = v;
  }
};

SHARDOPT_END_NAMESPACE
