// The norm of all gradients, from the sum of their squares or the largest magnitude, and the factor that clips them.
#pragma once

#include "core/exact_sum.h"

SHARDOPT_BEGIN_NAMESPACE

// The norm, and the factor of gradients that makes their norm at most a given number: computed from the norm as by
// torch.nn.utils.clip_grad_norm_, in float32.
struct Clip {
  float norm, coefficient;
};

// words: an ExactSum, or the bits of a magnitude.
SHARDOPT_HD Clip clip_of(const int64_t* words, bool is_magnitude, float max_norm) {
  const float norm =
      is_magnitude ? float_from_bits(static_cast<int32_t>(*words)) : root_of(*reinterpret_cast<const ExactSum*>(words));
  const float coefficient = reciprocal(norm + 1e-6f) * max_norm;
  return {norm, coefficient > 1.0f ? 1.0f : coefficient};  // NaN stays
}

SHARDOPT_END_NAMESPACE
