// Passes over gradients on a CUDA device. Not run on a GPU so far: compiled for sm_90, and its source run on the CPU by
// tests.
#pragma once

#include "norm/norm.h"

namespace shardopt {

// Elements of a kernel row from `first` on, at most kNormTask of them: the work of one warp.
struct NormTask {
  int64_t first;
  int64_t kernel_row;
};
constexpr int64_t kNormTask = 8192;

// Both functions only launch kernels, in the given stream of the current device, and throw std::runtime_error if the
// launch fails. All pointers point to memory of the device. The results equal the results of norm_cpu and clip_of.
void norm_cuda(const NormCall& call, const NormTask* tasks, int64_t task_count, const float* factor, void* stream);
// clip: two floats.
void clip_cuda(const int64_t* words, bool is_magnitude, float max_norm, float* clip, void* stream);

}  // namespace shardopt
