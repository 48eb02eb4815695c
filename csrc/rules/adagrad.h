// Adagrad (Duchi et al., JMLR 12, 2011) as torch.optim.Adagrad defines it.
#pragma once

#include "core/rule.h"

SHARDOPT_BEGIN_NAMESPACE

struct Adagrad {
  static constexpr const char* kName = "adagrad";
  using Kept = Moments<MomentKind::kUnsigned>;
  static constexpr const char* kHyper[] = {"lr", "lr_decay", "eps", "coupled_decay"};
  static constexpr float kLargestSum = 0x1p126f;  // sums of squares grow without limit, but must not become infinite

  float rate, eps, coupled_decay;

  SHARDOPT_HD static Adagrad make(const double* hyper, double step) {
    return {static_cast<float>(hyper[0] / (1.0 + (step - 1.0) * hyper[1])), static_cast<float>(hyper[2]),
            static_cast<float>(hyper[3])};
  }

  template <class F>
  SHARDOPT_HD void update(F& param, F gradient, F* moment, F* roots) const {
    const F g = add_scaled(coupled_decay, param, gradient);
    const F sum = fma(g, g, min_float(moment[0], spread<F>(kLargestSum)));
    const F root = square_root(sum);
    param = fma(-rate, g * reciprocal(root + eps), param);
    moment[0] = sum;
    roots[0] = root;
  }
};

SHARDOPT_END_NAMESPACE
