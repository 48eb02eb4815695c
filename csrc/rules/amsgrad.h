// AMSGrad (Reddi et al., arXiv 1904.09237, algorithm 2): the second moment never falls.
#pragma once

#include "rules/adam.h"

SHARDOPT_BEGIN_NAMESPACE

struct Amsgrad : Adam {
  static constexpr const char* kName = "amsgrad";
  using Kept = Moments<MomentKind::kSigned, MomentKind::kUnsigned, MomentKind::kUnsigned>;

  SHARDOPT_HD static Amsgrad make(const double* hyper, double step) { return {Adam::make(hyper, step)}; }

  template <class F>
  SHARDOPT_HD void update(F& param, F gradient, F* moment, F* roots) const {
    const F g = add_scaled(coupled_decay, param, gradient);
    moment[0] = fma(one_minus_beta1, g - moment[0], moment[0]);
    moment[1] = fma(one_minus_beta2, fma(g, g, -moment[1]), moment[1]);
    moment[2] = max_float(moment[2], moment[1]);
    roots[0] = square_root(moment[1]);
    roots[1] = square_root(moment[2]);
    const F denominator = fma(roots[1], inverse_root_correction2, eps);
    param = fma(-step_size, moment[0] * reciprocal(denominator), decayed(param, decoupled_decay));
  }
};

SHARDOPT_END_NAMESPACE
