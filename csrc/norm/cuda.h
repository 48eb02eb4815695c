// Passes over gradients on a CUDA device. Not run on a GPU so far: compiled for sm_90, and its source run on the CPU by
// tests.
#pragma once

#include "norm/norm.h"

namespace shardopt {

// Elements of an entry from `first` on, at most kNormTask of them: the work of one warp.
struct NormTask {
  int64_t first;
  int64_t entry;
};
constexpr int64_t kNormTask = 8192;

// Both only launch, in the given stream of the current device, and throw std::runtime_error if that fails. All pointers
// are of the device. The results are those of norm_cpu and root_of.
void norm_cuda(const NormCall& call, const NormTask* tasks, int64_t task_count, const float* factor, void* stream);
void sum_root_cuda(const ExactSum* sum, float* root, void* stream);

}  // namespace shardopt
