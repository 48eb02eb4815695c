// StableAdamW (Wortsman et al., arXiv 2304.13013, algorithm 2): AdamW with Adafactor's clipping of updates.
#pragma once

#include "rules/adam.h"

SHARDOPT_BEGIN_NAMESPACE

struct StableAdamW {
  static constexpr const char* kName = "stable_adamw";
  using Kept = Adam::Kept;
  static constexpr const char* kHyper[] = {"lr", "beta1", "beta2", "eps", "coupled_decay", "decoupled_decay"};
  static constexpr int kSums = 1;  // squares of the gradient over the root of its mean square

  Adam adam;

  SHARDOPT_HD static StableAdamW make(const double* hyper, double step) { return {Adam::make(hyper, step)}; }

  SHARDOPT_HD void with_sums(const double* sums, double numel) {
    const double rms = square_root(sums[0] / numel);
    if (rms <= 1.0) return;
    adam.step_size = static_cast<float>(adam.step_size / rms);
    adam.decoupled_decay = static_cast<float>(adam.decoupled_decay / rms);
  }

  template <class F>
  SHARDOPT_HD void terms(F param, F gradient, F* moment, F* x) const {
    F root;
    adam.update(param, gradient, moment, &root);
    const F denominator = max_float(root * adam.inverse_root_correction2, spread<F>(adam.eps));
    x[0] = select(denominator < 0x1p-126f, spread<F>(0.0f), gradient * reciprocal(denominator));
  }

  template <class F>
  SHARDOPT_HD void update(F& param, F gradient, F* moment, F* roots) const {
    adam.update(param, gradient, moment, roots);
  }
};

SHARDOPT_END_NAMESPACE
