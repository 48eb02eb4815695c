// Adam (Kingma & Ba, arXiv 1412.6980, algorithm 1) and AdamW (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2).
#pragma once

#include "core/numeric.h"
#include "core/rule.h"

SHARDOPT_BEGIN_NAMESPACE

struct Adam {
  static constexpr const char* kName = "adam";
  using Kept = Moments<MomentKind::kSigned, MomentKind::kUnsigned>;
  static constexpr const char* kHyper[] = {"lr", "beta1", "beta2", "eps", "coupled_decay", "decoupled_decay"};

  float one_minus_beta1, one_minus_beta2, eps;
  float coupled_decay;             // Adam: times the parameter, added to the gradient
  float decoupled_decay;           // AdamW: share of the parameter that is taken off first
  float step_size;                 // lr / (1 - beta1^t)
  float inverse_root_correction2;  // 1 / sqrt(1 - beta2^t)

  SHARDOPT_HD static Adam make(const double* hyper, double step) {
    const double lr = hyper[0], beta1 = hyper[1], beta2 = hyper[2];
    Adam rule;
    rule.one_minus_beta1 = static_cast<float>(1.0 - beta1);
    rule.one_minus_beta2 = static_cast<float>(1.0 - beta2);
    rule.eps = static_cast<float>(hyper[3]);
    rule.coupled_decay = static_cast<float>(hyper[4]);
    rule.decoupled_decay = static_cast<float>(lr * hyper[5]);
    rule.step_size = static_cast<float>(lr / (1.0 - power(beta1, step)));
    rule.inverse_root_correction2 = static_cast<float>(1.0 / square_root(1.0 - power(beta2, step)));
    return rule;
  }

  // Roots of v below the limit come from gradients that are not large, and every denominator computed from roots
  // between kLeastQuickRoot and the limit, or from roots of zero, is normal or zero, and so is its reciprocal. A limit
  // of 0 promises this of no root.
  SHARDOPT_HD float root_limit() const {
    const bool is_usual = (coupled_decay == 0.0f || coupled_decay >= 1e-9f) && step_size < 1e3f && eps < 1e9f &&
                          (eps == 0.0f || eps >= 0x1p-126f) && inverse_root_correction2 < 1e9f;
    return is_usual ? 0x1p62f * square_root(one_minus_beta2) : 0.0f;
  }

  template <class F>
  SHARDOPT_HD void update(F& param, F gradient, F* moment, F* roots) const {
    const F g = add_scaled(coupled_decay, param, gradient);
    const F m = fma(one_minus_beta1, g - moment[0], moment[0]);
    const F v = fma(one_minus_beta2, fma(g, g, -moment[1]), moment[1]);  // >= 0, as 0 <= 1 - beta2 <= 1
    const F root = square_root(v);
    const F denominator = fma(root, inverse_root_correction2, eps);
    param = fma(-step_size, m * reciprocal(denominator), decayed(param, decoupled_decay));
    moment[0] = m;
    moment[1] = v;
    roots[0] = root;
  }
};

SHARDOPT_END_NAMESPACE
