// Helpers for rules, and how a rule declares its moments.
//
// A rule is a struct of the step's float32 scalars with
//   kName, kHyper      its name and the names of its hyper-parameters, "lr" first, in the order of `make`
//   Kept               the kinds of the moments it keeps, in the order of `moment`
//   make(hyper, step)  the scalars, computed once per step in double from operations that round alike everywhere
//   update(...)        the mathematics of one element. roots[j] receives the square root of the j-th kUnsigned moment
//   root_limit()       of a rule in UsualRules with an unsigned moment: see Adam
//   coupled_decay      where the rule adds the parameter, times this, to the gradient
//   gain()             where the rule squares more than that sum: an upper bound of the factor, at least 1
// and, where its scalars depend on sums of squares over the whole parameter,
//   kSums              the number of sums
//   terms(...)         the numbers whose squares one element adds to the sums, one number per sum
//   with_sums(...)     takes the sums and the number of the parameter's elements
//   kProducts          true: `terms` has two numbers per sum, and an element adds their product
//   kTotals            true: the sums are over all parameters of the optimizer. The rule has no `with_sums`: its
//                      `with_totals` in Python takes the sums before the step itself, and gives
//                      hyper-parameters that follow from the sums
// and, where parameters make up for the rounding error of a signed moment's codes,
//   kRepays            true
//   repaid(...)        the parameter after `update`, moved for the error of the coded moment
// Rules do not depend on codecs, devices or shards.
#pragma once

#include <type_traits>

#include "core/numeric.h"

SHARDOPT_BEGIN_NAMESPACE

// A moment's kind says how the moment may be coded.
enum class MomentKind {
  kSigned,     // an average of gradients: a relative codec codes it in units of the first unsigned moment's coded root
  kUnsigned,   // a mean or sum of squares: coded by its root where the codec says so
  kMagnitude,  // >= 0 and in units of gradients: coded without a root; relative codecs treat such a moment as a root
  kOwnUnits,   // signed, in units of its own
  kWide,       // a slow signed average, which 8 bits cannot hold: 16 bits
  kExact,      // float32, whatever the codec; written even where the update is lost
};

constexpr bool is_unsigned(MomentKind kind) { return kind == MomentKind::kUnsigned || kind == MomentKind::kMagnitude; }

// base^exponent for whole exponents >= 0, by squaring: the same bits on every device, which libm's pow does not
// promise.
SHARDOPT_HD double power(double base, double exponent) {
  double result = 1.0;
  for (int64_t n = static_cast<int64_t>(exponent); n > 0; n >>= 1) {
    if (n & 1) result *= base;
    base *= base;
  }
  return result;
}

// e^x of x <= 0, to 15 digits: the same bits on every device.
SHARDOPT_HD double exponential(double x) {
  if (x < -745.0) return 0.0;
  int halvings = 0;
  for (; x < -0.5; x *= 0.5) ++halvings;
  double sum = 1.0, term = 1.0;
  for (int n = 1; n < 18; ++n) {
    term *= x / n;
    sum += term;
  }
  for (; halvings > 0; --halvings) sum *= sum;
  return sum;
}

SHARDOPT_HD double square_root(double x) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(x);
#else
  return __builtin_sqrt(x);
#endif
}

// Below this magnitude, 2^63, the square of a number is finite, and so are the moments, which are averages of squares.
constexpr int32_t kLargeBits = (127 + 63) << 23;

template <class Rule, class = void>
constexpr bool kHasGain = false;
template <class Rule>
constexpr bool kHasGain<Rule, std::void_t<decltype(&Rule::gain)>> = true;

template <class Rule, class = void>
constexpr bool kHasCoupledDecay = false;
template <class Rule>
constexpr bool kHasCoupledDecay<Rule, std::void_t<decltype(&Rule::coupled_decay)>> = true;

// The largest factors by which a rule multiplies gradient and parameter before squaring their sum. No update overflows
// as long as both products are below kLargeBits.
struct Gains {
  float gradient = 1.0f, param = 0.0f;
};

template <class Rule>
SHARDOPT_HD Gains gains_of(const Rule& rule) {
  Gains gains;
  if constexpr (kHasGain<Rule>) gains.gradient = rule.gain();
  // The factor 8 bounds the decay by 2^60: added to a gradient below 2^63, the sum has a finite square.
  if constexpr (kHasCoupledDecay<Rule>) gains.param = 8.0f * rule.coupled_decay * gains.gradient;
  return gains;
}

// The larger magnitude of the two products, as bits.
template <class F>
SHARDOPT_HD IntOf<F> largest_product(const Gains& gains, F gradient, F param) {
  const auto largest = magnitude_bits(gains.gradient * gradient);
  return gains.param == 0.0f ? largest : max_int(largest, magnitude_bits(gains.param * param));
}

// Whether an update is to be undone because its gradient is NaN or Inf, or because gradient or parameter are so large
// that the update overflows: bool, or a mask of lanes. A rule with a gain may keep the gradient for its next update,
// which can then overflow: every large update is undone.
template <class Rule, class F>
SHARDOPT_HD auto is_lost(const Rule& rule, F gradient, F param, F new_param, const F* new_moments) {
  const auto largest = largest_product(gains_of(rule), gradient, param);
  if constexpr (kHasGain<Rule>) {
    return largest >= kLargeBits;
  } else {
    auto worst = max_int(magnitude_bits(gradient), magnitude_bits(new_param));
    for (int k = 0; k < Rule::Kept::kCount; ++k) worst = max_int(worst, magnitude_bits(new_moments[k]));
    return select(largest >= kLargeBits, worst, worst & 0) >= kInfinityBits;
  }
}

// fma(factor, x, y), but the very bits of y if the factor is zero: a term that is switched off changes nothing, not
// even a y of -0, or a sum with an infinite x.
template <class F>
SHARDOPT_HD F add_scaled(float factor, F x, F y) {
  return factor != 0.0f ? fma(factor, x, y) : y;
}

// Decoupled weight decay of a parameter. Not param * (1 - decay): that factor's rounding would be a bias of
// some percent of a small decay.
template <class F>
SHARDOPT_HD F decayed(F param, float decay) {
  return add_scaled(-decay, param, param);
}

// The larger of a and b; b where either is NaN.
template <class F>
SHARDOPT_HD F max_float(F a, F b) {
  return select(a > b, a, b);
}
template <class F>
SHARDOPT_HD F min_float(F a, F b) {
  return select(a < b, a, b);
}

// The number of sums that a rule needs.
template <class Rule, class = void>
constexpr int kSumsOf = 0;
template <class Rule>
constexpr int kSumsOf<Rule, std::void_t<decltype(Rule::kSums)>> = Rule::kSums;

// Whether a rule repays: its parameters make up for the rounding error of its moments' codes.
template <class Rule, class = void>
constexpr bool kRepaysOf = false;
template <class Rule>
constexpr bool kRepaysOf<Rule, std::void_t<decltype(Rule::kRepays)>> = Rule::kRepays;

template <class Rule, class = void>
constexpr bool kHasProducts = false;
template <class Rule>
constexpr bool kHasProducts<Rule, std::void_t<decltype(Rule::kProducts)>> = Rule::kProducts;

template <class Rule, class = void>
constexpr bool kHasTotals = false;
template <class Rule>
constexpr bool kHasTotals<Rule, std::void_t<decltype(Rule::kTotals)>> = Rule::kTotals;

// The kinds of a rule's moments, in the order of `moment`.
template <MomentKind... kinds>
struct Moments {
  static constexpr int kCount = sizeof...(kinds);
  static constexpr MomentKind kKinds[kCount + 1] = {kinds..., MomentKind::kSigned};

  // The index of the first unsigned moment, beside which signed moments stand; -1 without one.
  static constexpr int kUnsigned = [] {
    for (int k = 0; k < kCount; ++k) {
      if (is_unsigned(kKinds[k])) return k;
    }
    return -1;
  }();

  // The index of the k-th moment among the moments of kind kUnsigned.
  static constexpr int root_of(int k) {
    int index = 0;
    for (int i = 0; i < k; ++i) index += kKinds[i] == MomentKind::kUnsigned;
    return index;
  }
};

SHARDOPT_END_NAMESPACE
