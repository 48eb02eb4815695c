// The kernels that begin a CUDA step: they count the step and compute the scalars of all kernel rows.
#pragma once

#include "step/cuda_kernel.h"

SHARDOPT_BEGIN_NAMESPACE

constexpr int kPrepareThreads = 256;

template <class Rule>
SHARDOPT_DEVICE void prepare_row(const CudaCall& call, int64_t i) {
  const KernelRow& kernel_row = call.kernel_rows[i];
  const GroupRow& group = call.groups[kernel_row.group];
  double hyper[kMaxHyper];
  float scale = group.gradient_scale;
  for (int k = 0; k < kMaxHyper; ++k) hyper[k] = group.hyper[k];
  if (group.lr) hyper[0] = *reinterpret_cast<const float*>(group.lr);
  if (call.grad_scale) scale *= static_cast<float>(1.0 / static_cast<double>(*call.grad_scale));  // as on the CPU
  if (call.factor) scale *= *call.factor;
  Prepared<Rule> prepared;
  prepared.step = *reinterpret_cast<const float*>(kernel_row.step) + (call.phase == Phase::kSums ? 1.0f : 0.0f);
  prepared.rule = Rule::make(hyper, prepared.step);
  if constexpr (kSumsOf<Rule> > 0 && !kHasTotals<Rule>) {
    if (kernel_row.sums && call.phase != Phase::kSums) {
      double sums[kSumsOf<Rule>];
      for (int j = 0; j < kSumsOf<Rule>; ++j) sums[j] = value_of(reinterpret_cast<const ExactSum*>(kernel_row.sums)[j]);
      prepared.rule.with_sums(sums, kernel_row.numel);
    }
  }
  prepared.gradient_scale = scale;
  prepared.dither = Dither(prepared.step);
  prepared.skips = group.nonfinite == static_cast<int32_t>(NonFinite::kSkip);
  *const_cast<Prepared<Rule>*>(prepared_of<Rule>(call, i)) = prepared;
}

template <class... Rule>
SHARDOPT_DEVICE void prepare_row(const CudaCall& call, int64_t i, List<Rule...>) {
  const int rule = call.groups[call.kernel_rows[i].group].rule;
  int index = 0;
  ((rule == index++ ? prepare_row<Rule>(call, i) : void()), ...);
}

SHARDOPT_DEVICE void prepare_row(const CudaCall& call, int64_t i, uint64_t gradient) {
  call.kernel_rows[i].gradient = gradient;
  prepare_row(call, i, Rules{});
}

// The addresses of gradients that a launch carries.
struct LaunchedGradients {
  uint64_t address[kLaunchedGradients];
};

SHARDOPT_DEVICE void count_step(const CudaCall& call, int64_t i) {
  if (call.phase != Phase::kSums) *call.steps[i] += 1.0f;
}

// Runs as one thread block: all steps must be counted before a kernel row's step count is read.
__global__ void __launch_bounds__(kPrepareThreads) prepare(CudaCall call, const LaunchedGradients gradients) {
  if (is_off(call)) return;
  for (int64_t i = threadIdx.x; i < call.step_count; i += blockDim.x) count_step(call, i);
  __syncthreads();
  for (int64_t i = threadIdx.x; i < call.row_count; i += blockDim.x) prepare_row(call, i, gradients.address[i]);
}

// For more kernel rows than a launch carries addresses: two launches of many thread blocks replace `prepare`.
__global__ void __launch_bounds__(kPrepareThreads) count_steps(CudaCall call) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(kPrepareThreads) + threadIdx.x;
  if (i < call.step_count && !is_off(call)) count_step(call, i);
}
__global__ void __launch_bounds__(kPrepareThreads) prepare_rows(CudaCall call, const uint64_t* gradients) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(kPrepareThreads) + threadIdx.x;
  if (i < call.row_count && !is_off(call)) prepare_row(call, i, gradients[i]);
}

SHARDOPT_END_NAMESPACE
