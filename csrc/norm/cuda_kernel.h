// The kernels that pass over gradients on CUDA: a warp takes a task, each lane kLane successive elements at a time.
#pragma once

#include "norm/clip.h"
#include "norm/cuda.h"
#include "step/cuda_sums.h"

SHARDOPT_BEGIN_NAMESPACE

constexpr int kNormThreads = 128;

template <NormPass kPass>
__global__ void __launch_bounds__(kNormThreads)
    pass_over(const KernelRow* kernel_rows, const NormTask* tasks, int64_t task_count, const float* factor) {
  const int64_t warp = blockIdx.x * int64_t{kNormThreads / kWarp} + threadIdx.x / kWarp;
  if (warp >= task_count) return;
  const NormTask task = tasks[warp];
  const KernelRow& kernel_row = kernel_rows[task.kernel_row];
  const Streams streams(kernel_row);
  const int64_t left = kernel_row.cols - task.first, end = task.first + (left < kNormTask ? left : kNormTask);
  const bool is_aligned = streams.gradient % 16 == 0;  // then tasks and lanes are aligned, too
  const float by = kPass == NormPass::kScale ? *factor : 1.0f;
  if (kPass == NormPass::kScale && by == 1.0f) return;
  WarpSum sum;
  int32_t largest = 0;
  for (int64_t at = task.first; at < end; at += kWarp * kLane) {
    const int64_t element = at + static_cast<int>(threadIdx.x % kWarp) * kLane, n = end - element;
    const Span span{element, static_cast<int>(n < kLane ? n : kLane), is_aligned && n >= kLane};
    float x[kLane];
    load_gradients(x, streams, span);
    if constexpr (kPass == NormPass::kSquares) sum.add_squares(x);
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      if constexpr (kPass == NormPass::kLargest) largest = max_int(largest, magnitude_bits(x[i]));
      if constexpr (kPass == NormPass::kScale) x[i] = x[i] * by;
    }
    if constexpr (kPass == NormPass::kScale) store_gradients(x, streams, span);
  }
  if constexpr (kPass == NormPass::kSquares) sum.add_to<true>(reinterpret_cast<ExactSum*>(kernel_row.sums));
  if constexpr (kPass == NormPass::kLargest) {
    largest = warp_max(largest);
    if (threadIdx.x % kWarp == 0 && largest != 0)
      atomicMax(reinterpret_cast<unsigned long long*>(kernel_row.sums), static_cast<unsigned long long>(largest));
  }
}

__global__ void clip_by(const int64_t* words, bool is_magnitude, float max_norm, float* clip) {
  const Clip found = clip_of(words, is_magnitude, max_norm);
  clip[0] = found.norm;
  clip[1] = found.coefficient;
}

using NormKernel = void (*)(const KernelRow*, const NormTask*, int64_t, const float*);

inline NormKernel kernel_of(NormPass pass) {
  return pass == NormPass::kSquares   ? pass_over<NormPass::kSquares>
         : pass == NormPass::kLargest ? pass_over<NormPass::kLargest>
                                      : pass_over<NormPass::kScale>;
}

SHARDOPT_END_NAMESPACE
