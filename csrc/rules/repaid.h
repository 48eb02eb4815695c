// Rules whose parameters make up for the rounding error of the first moment's codes. That error would move the
// parameter in all later steps; `repaid` moves the parameter by the sum of these movements at once.
#pragma once

#include "rules/adam.h"

SHARDOPT_BEGIN_NAMESPACE

// Adam. An error e of the first moment moves the parameter in all later steps by lr e sum_{k >= 1} beta1^k / (1 -
// beta1^(t + k)), over the denominator of the update, which is computed from the coded root.
struct RepaidAdam : Adam {
  static constexpr const char* kName = "repaid_adam";
  static constexpr bool kRepays = true;

  float repayment;  // lr times that sum

  SHARDOPT_HD static RepaidAdam make(const double* hyper, double step) {
    RepaidAdam rule;
    static_cast<Adam&>(rule) = Adam::make(hyper, step);
    rule.repayment = static_cast<float>(hyper[0] * later_steps(hyper[1], step));
    return rule;
  }

  // The parameter after `update`, moved for the error of its coded moment (true less coded), given the coded root.
  template <class F>
  SHARDOPT_HD F repaid(F param, F error, F root) const {
    const F denominator = fma(root, inverse_root_correction2, eps);
    return select(error != 0.0f, fma(-repayment, error * reciprocal(denominator), param), param);
  }

 private:
  // The sum over k, computed as the sum over j of beta1^(j t) beta1^(1 + j) / (1 - beta1^(1 + j)), which needs few
  // terms once t is large.
  SHARDOPT_HD static double later_steps(double beta1, double step) {
    const double ratio = power(beta1, step);
    double sum = 0.0, weight = 1.0, decay = beta1;
    for (int j = 0; j < kMostTerms && weight * decay > 1e-9 * sum; ++j) {
      sum += weight * (decay / (1.0 - decay));
      weight *= ratio;
      decay *= beta1;
    }
    return sum;
  }
  static constexpr int kMostTerms = 100000;
};

SHARDOPT_END_NAMESPACE
