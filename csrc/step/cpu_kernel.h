// The step of a run of blocks on the CPU, compiled once per instruction set (step/cpu_<target>.cpp), and the choice of
// a kernel for a row of the table.
#pragma once

#include "step/cpu_block.h"
#include "step/cpu_call.h"
#include "step/cpu_run.h"
#include "step/instances.h"

SHARDOPT_BEGIN_NAMESPACE

// Calls step(block) for blocks [begin, end) of a kernel row, counted along its rows.
template <class Rule, class Codec, class Format, class Step>
SHARDOPT_HD void each_block(const KernelRow& kernel_row, int64_t begin, int64_t end, Step step) {
  using Code = typename Codec::Code;
  constexpr int kMoments = Rule::Kept::kCount;
  const Format format(kernel_row);
  const Dither dither(*reinterpret_cast<const float*>(kernel_row.step));
  const int64_t blocks_per_row = (kernel_row.cols + kernel_row.block_size - 1) / kernel_row.block_size;
  int64_t row = begin / blocks_per_row, in_row = begin % blocks_per_row;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t col = in_row * kernel_row.block_size, left = kernel_row.cols - col,
                  offset = row * kernel_row.row_stride + col;
    Block<Code, kMoments> block;
    block.weights = weights_at(kernel_row, format, offset);
    block.gradient = reinterpret_cast<const char*>(kernel_row.gradient) + bytes_of(format.gradient()) * offset;
    for (int k = 0; k < kMoments; ++k) {
      block.codes[k] = reinterpret_cast<Code*>(kernel_row.codes[kSharesCodes<Codec> ? 0 : k]) + offset;
    }
    block.scale_index = row * kernel_row.scales_row_stride + in_row;
    block.dither = dither.from(global_element(kernel_row, row, col)).offset;
    block.n = static_cast<int>(left < kernel_row.block_size ? left : kernel_row.block_size);
    step(block);
    if (++in_row == blocks_per_row) {
      in_row = 0;
      ++row;
    }
  }
}

// Steps blocks of any size, one after the other.
template <class Rule, class Codec, class Format, int kPack>
int64_t step_each(const StepCall& call, const KernelRow& kernel_row, int64_t begin, int64_t end) {
  BlockStepper<Rule, Codec, Format, kPack, kMaxBlock, 1, false> stepper(call, kernel_row);
  int64_t nonfinite = 0;
  each_block<Rule, Codec, Format>(kernel_row, begin, end, [&](const auto& block) { nonfinite += stepper.add(block); });
  return nonfinite;
}

// Steps blocks of 128 elements by packs of SHARDOPT_PACK vectors, and shorter blocks at rows' ends by 16 elements. If
// memory is masked, usual codecs take the longer ones of these by packs, too.
template <class Rule, class Codec, class Format>
int64_t step_blocks_of_128(const StepCall& call, const KernelRow& kernel_row, int64_t begin, int64_t end) {
  constexpr int kWhole = 128, kFew = 32, kOne = 16 / kLanes;
  const auto rest_of_row = static_cast<int>(kernel_row.cols % kWhole);
  BlockStepper<Rule, Codec, Format, SHARDOPT_PACK, kWhole, 4, true> whole(call, kernel_row);
  const auto step_all = [&](auto&& rest) __attribute__((always_inline)) {
    int64_t nonfinite = 0;
    each_block<Rule, Codec, Format>(kernel_row, begin, end, [&](const auto& block) __attribute__((always_inline)) {
      nonfinite += block.n == kWhole ? whole.add(block) : rest.add(block);
    });
    return nonfinite + whole.step_waiting() + rest.step_waiting();
  };
  if constexpr (kMasksMemory && is_usual<Rule, Codec>()) {
    if (rest_of_row > kFew) {
      return step_all(BlockStepper<Rule, Codec, Format, SHARDOPT_PACK, kWhole, 8, false>(call, kernel_row));
    }
    return step_all(BlockStepper<Rule, Codec, Format, kOne, kFew, 8, false>(call, kernel_row));
  } else {
    return step_all(BlockStepper<Rule, Codec, Format, kOne, kWhole, 4, false>(call, kernel_row));
  }
}

// The kernel for kernel rows in these formats, which are known when compiling; nullptr if the kernel row has other
// formats.
template <class Rule, class Codec, WeightFormat kWeight, DType kGradient>
CpuKernel kernel_of_format(const KernelRow& kernel_row) {
  const bool is_it = kernel_row.weight_format == static_cast<int32_t>(kWeight) &&
                     kernel_row.gradient_dtype == static_cast<int32_t>(kGradient);
  if (!is_it) return nullptr;
  using Format = FixedFormat<kWeight, kGradient>;
  if constexpr (Codec::Signed::kScales > 0) {
    return step_blocks_of_128<Rule, Codec, Format>;
  } else {
    return step_each<Rule, Codec, Format, SHARDOPT_PACK>;
  }
}

// Steps blocks in a usual format by a kernel in which rule, codec and format are compiled together, and other blocks
// run by run.
template <class Rule, class Codec>
int64_t step_usual(const StepCall& call, const KernelRow& kernel_row, int64_t begin, int64_t end) {
  CpuKernel kernel = nullptr;
  // Codecs without blocks fill rows up to packs: shorter rows are better stepped as runs.
  const bool fits =
      Codec::Signed::kScales > 0 ? kernel_row.block_size == 128 : kernel_row.cols >= SHARDOPT_PACK * kLanes;
  if (!kernel_row.cut && fits && call.phase == Phase::kStep) {
    kernel = kernel_of_format<Rule, Codec, WeightFormat::kFloat32, DType::kFloat32>(kernel_row);
    if (!kernel) kernel = kernel_of_format<Rule, Codec, WeightFormat::kBFloat16, DType::kBFloat16>(kernel_row);
    if (!kernel) kernel = kernel_of_format<Rule, Codec, WeightFormat::kBFloat16Plus8, DType::kBFloat16>(kernel_row);
  }
  return (kernel ? kernel : step_runs)(call, kernel_row, begin, end);
}

template <class Rule, class Codec>
constexpr CpuKernel kernel_of() {
  if constexpr (SHARDOPT_PACK > 1 && (is_usual<Rule, Codec>() || is_usual_on_cpu<Rule, Codec>())) {
    return step_usual<Rule, Codec>;
  } else {
    return step_runs;
  }
}

template <class Codec, class... Rule>
CpuKernel kernel_of_rule(int rule, List<Rule...>) {
  constexpr CpuKernel kernels[] = {kernel_of<Rule, Codec>()...};
  return kernels[rule];
}

template <class... Codec>
CpuKernel kernel_of_codec(int codec, int rule, List<Codec...>) {
  using OfRule = CpuKernel (*)(int, Rules);
  constexpr OfRule of_codec[] = {[](int r, Rules rules) { return kernel_of_rule<Codec>(r, rules); }...};
  return of_codec[codec](rule, Rules{});
}

CpuKernel cpu_kernel(int codec, int rule) { return kernel_of_codec(codec, rule, Codecs{}); }

SHARDOPT_END_NAMESPACE
