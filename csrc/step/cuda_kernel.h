// The kernels that step on CUDA: step_tasks steps the tasks of a rule, step_usual_tasks the tasks of a rule, a codec
// and a weight format, whether their blocks are whole and aligned or their rows have any length.
#pragma once

#include <type_traits>
#include <utility>

#include "step/cuda_aligned.h"
#include "step/cuda_staged.h"

SHARDOPT_BEGIN_NAMESPACE

constexpr int kThreads = 128;
constexpr int kResident = 4;  // thread blocks that the registers of a multiprocessor must suffice for

SHARDOPT_DEVICE bool is_off(const CudaCall& call) { return call.found_inf && *call.found_inf != 0.0f; }

template <class Rule>
SHARDOPT_DEVICE const Prepared<Rule>* prepared_of(const CudaCall& call, int64_t kernel_row) {
  static_assert(sizeof(Prepared<Rule>) <= kPreparedBytes, "raise kPreparedBytes");
  return reinterpret_cast<const Prepared<Rule>*>(static_cast<const char*>(call.prepared) + kernel_row * kPreparedBytes);
}

SHARDOPT_DEVICE void count_skipped(const CudaCall& call, int skipped) {
  if (skipped) atomicAdd(call.nonfinite, static_cast<unsigned long long>(skipped));
}

// Functions that are not inlined, so that no codec takes registers from another, nor a rare kind of block from the
// usual kind.
template <class Rule, class Codec, bool kOnce>
__device__ __noinline__ int step_task(const CudaTask task, const KernelRow& kernel_row, const Prepared<Rule>& prepared,
                                      const float* table, Phase phase) {
  return WarpStepper<Rule, Codec>(kernel_row, prepared, table, phase).template step<kOnce>(task);
}

// Whether blocks of one chunk are stepped by a function of their own: only for rules that have kernels of their own;
// compiling the others so would take twice as long.
template <class Rule, class Codec>
constexpr bool kReadsOnce = is_usual<Rule, Codec>() && (Codec::Signed::kScales > 0);

template <class Rule, class... Codec>
SHARDOPT_DEVICE int step_task(const CudaCall& call, const CudaTask& task, const KernelRow& kernel_row, List<Codec...>) {
  const Prepared<Rule>& prepared = *prepared_of<Rule>(call, task.kernel_row);
  const float* table = call.tables[kernel_row.codec];
  const bool once = kernel_row.block_size <= kChunk && !kernel_row.cut;
  int skipped = 0;
  (((Rule::Kept::kCount == 0 || kernel_row.codec == kCodecIndex<Codec>)
        ? void(skipped =
                   once ? step_task<Rule, Codec, kReadsOnce<Rule, Codec>>(task, kernel_row, prepared, table, call.phase)
                        : step_task<Rule, Codec, false>(task, kernel_row, prepared, table, call.phase))
        : void()),
   ...);
  return skipped;
}

template <class Rule, class Codec>
__device__ __noinline__ void add_task_to_sums(const CudaTask task, const KernelRow& kernel_row,
                                              const Prepared<Rule>& prepared, const float* table) {
  WarpStepper<Rule, Codec>(kernel_row, prepared, table, Phase::kSums).add_to_sums(task);
}

template <class Rule, class... Codec>
SHARDOPT_DEVICE void add_task_to_sums(const CudaCall& call, const CudaTask& task, const KernelRow& kernel_row,
                                      List<Codec...>) {
  const Prepared<Rule>& prepared = *prepared_of<Rule>(call, task.kernel_row);
  ((kernel_row.codec == kCodecIndex<Codec>
        ? add_task_to_sums<Rule, Codec>(task, kernel_row, prepared, call.tables[kernel_row.codec])
        : void()),
   ...);
}

// The codecs that a rule's kernel rows may have. A rule without moments does not use its codec, so that one codec
// stands for all. Few rules may have shared codecs; repaying rules have relative codecs, and float32 for small
// parameters. Of few kernels, rules that are not usual have two codecs: their code only knows whether codes are roots.
template <class Rule>
using ManyCodecsOf = std::conditional_t<may_share_codes<Rule>(), Codecs, UnsharedCodecs>;
template <class Rule>
using CodecsOf = std::conditional_t<
    Rule::Kept::kCount == 0, List<Float32>,
    std::conditional_t<kRepaysOf<Rule>, List<Float32, Log8, Log4>,
                       std::conditional_t<kFewKernels && !is_usual<Rule, Log8>(), List<Float32, Log8>,
                                          ManyCodecsOf<Rule>>>>;

// A warp per task, all of one rule.
template <class Rule>
__global__ void __launch_bounds__(kThreads, kResident) step_tasks(CudaCall call, CudaBatch batch) {
  const int64_t i = batch.begin + (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / kWarp;
  if (i >= batch.end || is_off(call)) return;
  const CudaTask task = call.tasks[i];
  const KernelRow& kernel_row = call.kernel_rows[task.kernel_row];
  if (call.phase == Phase::kSums) {
    if constexpr (kSumsOf<Rule> > 0) {
      if (kernel_row.sums) add_task_to_sums<Rule>(call, task, kernel_row, CodecsOf<Rule>{});
    }
    return;
  }
  if (call.phase != Phase::kStep && !kernel_row.cut) return;
  count_skipped(call, step_task<Rule>(call, task, kernel_row, CodecsOf<Rule>{}));
}

template <class Rule, class Codec, class Stepper>
SHARDOPT_DEVICE int step_aligned(const CudaCall& call, const CudaTask& task, const typename Stepper::Table& table,
                                 typename Stepper::Ring& ring) {
  const KernelRow& kernel_row = call.kernel_rows[task.kernel_row];
  const Prepared<Rule>& prepared = *prepared_of<Rule>(call, task.kernel_row);
  const int turn_blocks = kTurn / kernel_row.block_size;
  const int turns = Stepper::is_aligned(kernel_row) ? task.blocks / turn_blocks : 0;
  static_assert(kMaxTaskBlocks * kAlignedBlock <= 32 * kTurn, "a bit per turn");
  uint32_t left = 0;  // a bit per turn that the stepper left unchanged
  Stepper stepper(kernel_row, prepared, table, task.first_block, ring);
  stepper.begin(turns);
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    if (!stepper.step(turns - turn)) left |= 1u << turn;
  }
  int skipped = 0;
  for (int turn = 0; turn * turn_blocks < task.blocks; ++turn) {
    const int first = turn * turn_blocks, blocks = min_int(turn_blocks, task.blocks - first);
    if (turn < turns && !(left >> turn & 1)) continue;
    const CudaTask rest{task.first_block + first, task.kernel_row, blocks};
    const float* codec_table = call.tables[kernel_row.codec];
    skipped += kernel_row.block_size <= kChunk
                   ? step_task<Rule, Codec, true>(rest, kernel_row, prepared, codec_table, Phase::kStep)
                   : step_task<Rule, Codec, false>(rest, kernel_row, prepared, codec_table, Phase::kStep);
  }
  return skipped;
}

template <class Rule, class Codec, class Stepper>
SHARDOPT_DEVICE int step_staged(const CudaCall& call, const CudaTask& task, const typename Stepper::Table& table,
                                typename Stepper::Stage& stage) {
  const KernelRow& kernel_row = call.kernel_rows[task.kernel_row];
  const Prepared<Rule>& prepared = *prepared_of<Rule>(call, task.kernel_row);
  Stepper stepper(kernel_row, prepared, table, stage);
  uint32_t left = 0;  // a bit per chunk that the stepper left unchanged
  ChunkWalk walk(kernel_row, task);
#pragma unroll 1
  for (int i = 0; walk.blocks_left > 0; ++i) {
    if (!stepper.step(walk.next())) left |= 1u << i;
  }
  if (left == 0) return 0;
  int skipped = 0;
  ChunkWalk again(kernel_row, task);
#pragma unroll 1
  for (int i = 0; again.blocks_left > 0; ++i) {
    const int64_t first = task.first_block + task.blocks - again.blocks_left;
    const Chunk chunk = again.next();
    if (!(left >> i & 1)) continue;
    const CudaTask rest{first, task.kernel_row, chunk.rows * chunk.row_blocks};
    skipped += step_task<Rule, Codec, true>(rest, kernel_row, prepared, call.tables[kernel_row.codec], Phase::kStep);
  }
  return skipped;
}

// Bytes of shared memory that a warp needs: for a ring if the batch has whole, aligned blocks, for a stage if the batch
// has others. Warps of one thread block may need either, so that the larger size holds for the whole launch.
template <class Aligned, class Staged>
SHARDOPT_HD unsigned warp_bytes(const CudaBatch& batch) {
  constexpr unsigned kRing = sizeof(typename Aligned::Ring), kStage = sizeof(typename Staged::Stage);
  const unsigned ring = batch.staged > batch.begin ? kRing : 0, stage = batch.end > batch.staged ? kStage : 0;
  return ring > stage ? ring : stage;
}

// A warp per task of blocks in a usual format, all of one rule, codec and format. Dynamic shared memory has a ring or a
// stage per warp, as the warp steps aligned blocks or others.
template <class Rule, class Codec, WeightFormat kWeight, DType kGradient>
__global__ void __launch_bounds__(kThreads, kResident) step_usual_tasks(CudaCall call, CudaBatch batch) {
  using Aligned = AlignedStepper<Rule, Codec, kWeight, kGradient>;
  using Staged = StagedStepper<Rule, Codec, kWeight, kGradient>;
  __shared__ typename Aligned::Table table;
  extern __shared__ uint4 memory[];
  if (is_off(call) || call.phase != Phase::kStep) return;
  table.fill(call.tables[batch.codec]);
  __syncthreads();
  const int64_t i = batch.begin + (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / kWarp;
  if (i >= batch.end) return;
  const CudaTask task = call.tasks[i];
  char* const share = reinterpret_cast<char*>(memory) + threadIdx.x / kWarp * warp_bytes<Aligned, Staged>(batch);
  if (i < batch.staged) {
    auto& ring = *reinterpret_cast<typename Aligned::Ring*>(share);
    count_skipped(call, step_aligned<Rule, Codec, Aligned>(call, task, table, ring));
  } else {
    auto& stage = *reinterpret_cast<typename Staged::Stage*>(share);
    count_skipped(call, step_staged<Rule, Codec, Staged>(call, task, table, stage));
  }
}

// A kernel that steps a batch, and the dynamic shared memory that it takes, in bytes.
struct Kernel {
  void (*run)(CudaCall, CudaBatch);
  size_t shared_bytes = 0;
};
using AlignedFormats = std::make_integer_sequence<int, kAlignedFormatCount>;

template <class Rule, class Codec, int kFormat>
Kernel usual_kernel(const CudaBatch& batch) {
  if constexpr (has_cuda_kernel<Rule, Codec>(kFormat)) {
    constexpr AlignedFormat kFound = kAlignedFormats[kFormat];
    using Aligned = AlignedStepper<Rule, Codec, kFound.weight, kFound.gradient>;
    using Staged = StagedStepper<Rule, Codec, kFound.weight, kFound.gradient>;
    return {step_usual_tasks<Rule, Codec, kFound.weight, kFound.gradient>,
            kAlignedWarps * warp_bytes<Aligned, Staged>(batch)};
  } else {
    return {nullptr};  // make_cuda_tasks gives such blocks no format
  }
}

template <class Rule, class Codec, int... kFormat>
Kernel kernel_of_format(const CudaBatch& batch, std::integer_sequence<int, kFormat...>) {
  const Kernel kernels[] = {usual_kernel<Rule, Codec, kFormat>(batch)...};
  return kernels[batch.format];
}

template <class Rule, class... Codec>
Kernel kernel_of_codec(const CudaBatch& batch, List<Codec...>) {
  if (batch.format < 0) return {step_tasks<Rule>};
  const Kernel kernels[] = {kernel_of_format<Rule, Codec>(batch, AlignedFormats{})...};
  return kernels[batch.codec];
}

// The kernel that steps a batch, of kThreads threads per thread block. rule: the index of the batch's rule in the list.
// A template, so that each source file compiles the kernels of its own list.
template <class... Rule>
Kernel kernel_of(const CudaBatch& batch, int rule, List<Rule...>) {
  const Kernel kernels[] = {kernel_of_codec<Rule>(batch, Codecs{})...};
  return kernels[rule];
}

// The kernels of OtherRules and of SumRules, compiled in step/cuda_rules.cu and step/cuda_sum_rules.cu.
Kernel other_kernel_of(const CudaBatch& batch, int rule);
Kernel sum_kernel_of(const CudaBatch& batch, int rule);

SHARDOPT_END_NAMESPACE
