// Muon (Jordan et al., 2024): two rules, between which shardopt/step/muon orthogonalizes the direction of the whole
// matrix.
#pragma once

#include "core/rule.h"

SHARDOPT_BEGIN_NAMESPACE

// Stores the direction in the parameter's place.
struct MuonDirection {
  static constexpr const char* kName = "muon_direction";
  using Kept = Moments<MomentKind::kSigned>;
  static constexpr const char* kHyper[] = {"lr", "momentum", "nesterov"};

  float gradient_weight;
  float look_ahead;  // the gradient's weight in the direction: 0 without Nesterov's variant

  SHARDOPT_HD static MuonDirection make(const double* hyper, double) {
    const float momentum = static_cast<float>(hyper[1]);
    return {static_cast<float>(1.0 - hyper[1]), hyper[2] != 0.0 ? 1.0f - momentum : 0.0f};
  }

  template <class F>
  SHARDOPT_HD void update(F& param, F gradient, F* moment, F*) const {
    moment[0] = fma(gradient_weight, gradient - moment[0], moment[0]);
    param = add_scaled(look_ahead, gradient - moment[0], moment[0]);
  }
};

// Moves the parameter by an orthogonalized direction, which stands in the gradient's place.
struct MuonApply {
  static constexpr const char* kName = "muon_apply";
  using Kept = Moments<>;
  static constexpr const char* kHyper[] = {"lr", "weight_decay", "scale"};

  float lr, decay;

  SHARDOPT_HD static MuonApply make(const double* hyper, double) {
    return {static_cast<float>(hyper[0] * hyper[2]), static_cast<float>(hyper[0] * hyper[1])};
  }

  template <class F>
  SHARDOPT_HD void update(F& param, F gradient, F*, F*) const {
    param = fma(-lr, gradient, decayed(param, decay));
  }
};

SHARDOPT_END_NAMESPACE
