// The step on a CUDA device. Everything that the call points to is in device memory.
#pragma once

#include "core/call.h"

namespace shardopt {

constexpr int kMaxRuleBytes = 64;

struct CudaCall {
  const TensorEntry* entries;
  const GroupEntry* groups;
  const int64_t* first_blocks;  // per entry, and the total: blocks before it, in the order of `entries`
  float* const* steps;
  const float* const* tables;  // per codec
  void* rules;                 // kMaxRuleBytes per entry: filled in here
  const float* grad_scale;     // the loss scale, or nullptr
  const float* found_inf;      // not zero: nothing is stepped. May be nullptr
  unsigned long long* nonfinite;
  int64_t step_count;
  Phase phase;
};

// Entries [begin, end) have one codec and one rule; `blocks` is how many blocks they have.
struct CudaBatch {
  int codec;
  int rule;
  int64_t begin, end;
  int64_t blocks;
};

// Counts up the steps and computes the scalars of each entry's rule. Once per step, before the first phase.
void prepare_cuda(const CudaCall& call, const CudaBatch& batch, void* stream);
void count_steps_cuda(const CudaCall& call, void* stream);

// Steps a batch in the given stream, without synchronization. Throws std::runtime_error if the launch fails.
void step_cuda(const CudaCall& call, const CudaBatch& batch, void* stream);

// The number of usable devices: 0 without a driver.
int cuda_device_count();

}  // namespace shardopt
