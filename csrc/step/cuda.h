// The step on a CUDA device: one launch counts the steps and prepares the scalars of all kernel rows. Then one launch
// per rule, codec and weight format steps blocks in usual formats, whether whole and aligned or of rows of any length
// at any address; one launch per rule steps all other blocks.
#pragma once

#include <vector>

#include "core/call.h"

namespace shardopt {

// Bytes of a `Prepared` per kernel row: the rule's scalars and the gradient's scale.
constexpr int kPreparedBytes = 64;

// Blocks [first_block, first_block + blocks) of one kernel row, counted along its rows: the work of one warp.
struct CudaTask {
  int64_t first_block;
  int32_t kernel_row;
  int32_t blocks;
};

// Everything that a call points to is in device memory.
struct CudaCall {
  KernelRow* kernel_rows;  // prepare_cuda fills in the gradients' addresses
  const GroupRow* groups;
  const CudaTask* tasks;
  float* const* steps;
  const float* const* tables;  // per codec, nullptr where it needs none
  void* prepared;              // kPreparedBytes per kernel row: filled in by prepare_cuda
  const float* grad_scale;     // the loss scale, or nullptr
  const float* factor;         // factor of all gradients, or nullptr
  const float* found_inf;      // a float32; if not zero, nothing is stepped. May be nullptr
  unsigned long long* nonfinite;
  int64_t row_count;
  int64_t step_count;
  Phase phase;
};

// Blocks of this size in a usual format have kernels of their own: one for whole, aligned blocks (step/cuda_aligned.h),
// which may also be larger, and one for blocks of rows of any length (step/cuda_staged.h).
constexpr int kAlignedBlock = 128, kLargestAlignedBlock = 512;
constexpr int kMaxTaskBlocks = 8192 / kAlignedBlock;  // blocks of a task, of this size

// The formats of weights and gradients of such blocks.
struct AlignedFormat {
  WeightFormat weight;
  DType gradient;
};
constexpr AlignedFormat kAlignedFormats[] = {
    {WeightFormat::kFloat32, DType::kFloat32},
    {WeightFormat::kBFloat16, DType::kBFloat16},
    {WeightFormat::kBFloat16Plus8, DType::kBFloat16},
    {WeightFormat::kBFloat16Plus16, DType::kBFloat16},
    {WeightFormat::kBFloat16Stochastic, DType::kBFloat16},
};
constexpr int kAlignedFormatCount = sizeof kAlignedFormats / sizeof *kAlignedFormats;

// Tasks [begin, end), all of one rule. `format`: index in kAlignedFormats of the blocks of all tasks, which then have
// one codec: tasks before `staged` have whole, aligned blocks, tasks from `staged` on any others, which are staged. A
// batch with format -1 may have blocks of any format and codec.
struct CudaBatch {
  int rule, codec, format;
  int64_t begin, staged, end;
};

// The kernel rows, cut into tasks, and batches of the tasks by rule.
struct CudaTasks {
  std::vector<CudaTask> tasks;
  std::vector<CudaBatch> batches;
};
CudaTasks make_cuda_tasks(const KernelRow* kernel_rows, int64_t row_count, const GroupRow* groups);

// The number of addresses that a launch carries: its 4 KiB of parameters hold them beside the call.
constexpr int kLaunchedGradients = 448;

// Begins Phase::kStep: counts up the steps, computes the scalars of each kernel row and stores its gradient's address.
// Also begins Phase::kSums, if the step has that phase, and then counts nothing. gradients: one per kernel row, on the
// host for up to kLaunchedGradients kernel rows, else on the device.
void prepare_cuda(const CudaCall& call, const uint64_t* gradients, void* stream);

// Steps a batch. prepare_cuda and step_cuda only launch kernels, in the given stream of the current device, and throw
// std::runtime_error if the launch fails.
void step_cuda(const CudaCall& call, const CudaBatch& batch, void* stream);

// Copies `count` ranges of memory of the host or the device, in the given stream.
void copy_cuda(const uint64_t* to, const uint64_t* from, const int64_t* nbytes, int64_t count, void* stream);

// Page-locks memory of the host for all devices, in a device's context. Returns CUDA's error, 0 for none; the error is
// cleared, so that the next call does not report it again.
int pin_cuda(int device, uint64_t address, uint64_t nbytes);
void unpin_cuda(int device, uint64_t address);

// Makes a device the current one for the guard's lifetime.
class CudaDeviceGuard {
 public:
  explicit CudaDeviceGuard(int device);
  ~CudaDeviceGuard();
  CudaDeviceGuard(const CudaDeviceGuard&) = delete;
  CudaDeviceGuard& operator=(const CudaDeviceGuard&) = delete;

 private:
  int saved_ = 0;
};

// The number of usable devices: 0 without a driver.
int cuda_device_count();

}  // namespace shardopt
