// Cautious optimizers (Liang et al., arXiv 2411.16085, algorithm 1), which leave out elements of the update that go
// against the gradient, and cautious weight decay (Chen et al., arXiv 2510.12402, algorithm 1), which decays only where
// decay and update have one direction. Wraps a rule that uses the parameter for nothing but decay.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>
#include <type_traits>

#include "rules/adam.h"
#include "rules/lion.h"

SHARDOPT_BEGIN_NAMESPACE

namespace cautious {

template <std::size_t kCount>
constexpr std::array<const char*, kCount + 2> with_flags(const char* const (&names)[kCount]) {
  std::array<const char*, kCount + 2> all{};
  for (std::size_t i = 0; i < kCount; ++i) all[i] = names[i];
  all[kCount] = "cautious";
  all[kCount + 1] = "cautious_weight_decay";
  return all;
}

// The index of a name in a list, or -1.
template <std::size_t kCount>
constexpr int index_of(std::string_view name, const char* const (&names)[kCount]) {
  for (std::size_t i = 0; i < kCount; ++i) {
    if (names[i] == name) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace cautious

template <class Rule>
struct Cautious {
  static_assert(std::is_same_v<Rule, Adam> || std::is_same_v<Rule, Lion>, "a name for the rule");
  static constexpr const char* kName = std::is_same_v<Rule, Adam> ? "cautious_adam" : "cautious_lion";
  using Kept = typename Rule::Kept;
  static constexpr auto kHyper = cautious::with_flags(Rule::kHyper);
  static constexpr int kSums = 1;  // the number of elements whose update goes with the gradient

  Rule rule;  // without decay
  float coupled_decay, decoupled_decay;
  float scale;  // factor of an update that leaves elements out
  bool is_cautious, decays_cautiously;

  static constexpr int kCoupled = cautious::index_of("coupled_decay", Rule::kHyper);
  static constexpr int kDecoupled = cautious::index_of("decoupled_decay", Rule::kHyper);

  SHARDOPT_HD static Cautious make(const double* hyper, double step) {
    constexpr int kCount = static_cast<int>(sizeof Rule::kHyper / sizeof *Rule::kHyper);
    double without_decay[kCount];
    for (int i = 0; i < kCount; ++i) without_decay[i] = i == kCoupled || i == kDecoupled ? 0.0 : hyper[i];
    Cautious made;
    made.rule = Rule::make(without_decay, step);
    made.coupled_decay = kCoupled < 0 ? 0.0f : static_cast<float>(hyper[kCoupled < 0 ? 0 : kCoupled]);
    made.decoupled_decay = static_cast<float>(hyper[0] * hyper[kDecoupled]);
    made.scale = 1.0f;
    made.is_cautious = hyper[kCount] != 0.0;
    made.decays_cautiously = hyper[kCount + 1] != 0.0;
    return made;
  }

  SHARDOPT_HD void with_sums(const double* sums, double numel) { scale = static_cast<float>(numel / (sums[0] + 1.0)); }

  template <class F>
  SHARDOPT_HD void terms(F param, F gradient, F* moment, F* x) const {
    F roots[Kept::kCount + 1];
    F g = gradient;
    const F change = change_of(param, g, moment, roots);
    x[0] = select(differ(change, g), spread<F>(1.0f), spread<F>(0.0f));
  }

  template <class F>
  SHARDOPT_HD void update(F& param, F gradient, F* moment, F* roots) const {
    const F change = change_of(param, gradient, moment, roots);
    F kept = decayed(param, decoupled_decay);
    if (decays_cautiously) kept = select(agree(change, param), param, kept);
    F applied = change;
    if (is_cautious)
      applied = select(differ(change, gradient), spread<F>(scale), spread<F>(0.0f)) * change;  // NaN stays
    param = kept + applied;
  }

 private:
  // Returns what the rule adds to a parameter without weight decay, and adds the L2 penalty to the gradient.
  template <class F>
  SHARDOPT_HD F change_of(F param, F& gradient, F* moment, F* roots) const {
    F change = spread<F>(0.0f);
    gradient = add_scaled(coupled_decay, param, gradient);
    rule.update(change, gradient, moment, roots);
    return change;
  }

  // Whether one of a and b is positive and the other negative. NaN is neither, whatever its sign bit.
  template <class F>
  SHARDOPT_HD auto differ(F a, F b) const {
    return select((bits(a) ^ bits(b)) < 0, lesser_bits(a, b), spread<IntOf<F>>(0)) > 0;
  }

  // Whether a and b are both positive or both negative.
  template <class F>
  SHARDOPT_HD auto agree(F a, F b) const {
    return select((bits(a) ^ bits(b)) < 0, spread<IntOf<F>>(0), lesser_bits(a, b)) > 0;
  }

  // The lesser magnitude of a and b, as bits; zero if either is NaN.
  template <class F>
  SHARDOPT_HD IntOf<F> lesser_bits(F a, F b) const {
    const auto x = magnitude_bits(a), y = magnitude_bits(b);
    return select(max_int(x, y) > kInfinityBits, spread<IntOf<F>>(0), min_int(x, y));
  }
};

SHARDOPT_END_NAMESPACE
