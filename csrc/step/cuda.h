// The step on a CUDA device: one launch counts the steps and prepares the scalars of all kernel rows; then one per
// rule, codec and weight format steps the blocks that are whole and aligned, and those of rows of any length at any
// address; one per rule steps all the others.
#pragma once

#include <vector>

#include "core/call.h"

namespace shardopt {

// Bytes of what is prepared per kernel row: the rule's scalars and its gradient's scale.
constexpr int kPreparedBytes = 64;

// Blocks [first_block, first_block + blocks) of one kernel row, counted along its rows: the work of one warp.
struct CudaTask {
  int64_t first_block;
  int32_t kernel_row;
  int32_t blocks;
};

// Everything that a call points to is in device memory.
struct CudaCall {
  KernelRow* kernel_rows;  // prepare_cuda puts the gradients' addresses in
  const GroupRow* groups;
  const CudaTask* tasks;
  float* const* steps;
  const float* const* tables;  // per codec, nullptr where it needs none
  void* prepared;              // kPreparedBytes per kernel row: filled in by prepare_cuda
  const float* grad_scale;     // the loss scale, or nullptr
  const float* factor;         // gradients are multiplied by it, or nullptr
  const float* found_inf;      // not zero: nothing is stepped. May be nullptr
  unsigned long long* nonfinite;
  int64_t row_count;
  int64_t step_count;
  Phase phase;
};

// Blocks of this size in a usual format have kernels of their own: whole and aligned ones (step/cuda_aligned.h), and
// those of rows of any length (step/cuda_staged.h).
constexpr int kAlignedBlock = 128;
constexpr int kMaxTaskBlocks = 8192 / kAlignedBlock;  // of a task of these

// Weights and gradients of such blocks.
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

// Tasks [begin, end), all of one rule. With a format, in kAlignedFormats, all are of blocks of it and of one codec:
// before `staged` whole and aligned ones, from there on any others, which are staged. Without one, -1, they are of
// anything.
struct CudaBatch {
  int rule, codec, format;
  int64_t begin, staged, end;
};

// The kernel rows cut into tasks, and these by rule.
struct CudaTasks {
  std::vector<CudaTask> tasks;
  std::vector<CudaBatch> batches;
};
// aligned: whether blocks that have kernels of their own go to these.
CudaTasks make_cuda_tasks(const KernelRow* kernel_rows, int64_t row_count, const GroupRow* groups, bool aligned);

// As many addresses as go with a kernel's launch: in 4 KiB beside the call itself.
constexpr int kLaunchedGradients = 448;

// Counts up the steps, computes the scalars of each kernel row and notes its gradient's address: at the beginning of
// Phase::kStep. Phase::kSums, if there is one, begins with it, too, and counts nothing. gradients: one per kernel row,
// on the host for up to kLaunchedGradients kernel rows, else on the device.
void prepare_cuda(const CudaCall& call, const uint64_t* gradients, void* stream);

// Steps a batch. Both only launch, in the given stream of the current device, and throw std::runtime_error if that
// fails.
void step_cuda(const CudaCall& call, const CudaBatch& batch, void* stream);

// Copies count ranges of memory of the host or the device, in the given stream.
void copy_cuda(const uint64_t* to, const uint64_t* from, const int64_t* nbytes, int64_t count, void* stream);

// Page-locks memory of the host for all devices. Returns CUDA's error, which is not left for the next call to report:
// 0 for none.
int pin_cuda(uint64_t address, uint64_t nbytes);
void unpin_cuda(uint64_t address);

// Makes a device the current one, as long as it lives.
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
