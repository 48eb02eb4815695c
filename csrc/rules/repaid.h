// Rules whose parameters make up for what the codes lose of the first moment. The error that coding leaves in it would
// move the parameter in all later steps; `repaid` moves it by the sum of these movements at once.
#pragma once

#include "rules/adam.h"

SHARDOPT_BEGIN_NAMESPACE

// Adam. What an error e of the first moment moves in all later steps is lr e sum_{k >= 1} beta1^k / (1 - beta1^(t + k))
// over the denominator of the update, for which the root as it was coded stands.
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

  // The parameter after `update`, given the error of its coded moment, true less coded, and the coded root.
  template <class F>
  SHARDOPT_HD F repaid(F param, F error, F root) const {
    const F denominator = fma(root, inverse_root_correction2, eps);
    return select(error != 0.0f, fma(-repayment, error * reciprocal(denominator), param), param);
  }

 private:
  // The sum over k, as one over j of beta1^(j t) beta1^(1 + j) / (1 - beta1^(1 + j)), which has few terms once t is
  // large.
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
