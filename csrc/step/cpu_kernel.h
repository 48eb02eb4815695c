// The step of a run of blocks on the CPU, compiled once per instruction set (step/cpu_<target>.cpp), and the choice of
// a kernel for a row of the table.
#pragma once

#include "step/cpu_block.h"
#include "step/cpu_call.h"
#include "step/cpu_run.h"
#include "step/instances.h"

SHARDOPT_BEGIN_NAMESPACE

// Steps blocks [begin, end) of a kernel row, counted along its rows, by kernels in which rule and codec are compiled
// together: by packs of kPack vectors, and shorter blocks by packs of 16 elements.
template <class Rule, class Codec, int kPack>
int64_t step_blocks(const StepCall& call, const KernelRow& kernel_row, int64_t begin, int64_t end) {
  using Code = typename Codec::Code;
  using Stepper = BlockStepper<Rule, Codec, kPack>;
  using RestStepper = BlockStepper<Rule, Codec, 16 / kLanes>;
  const int size = kernel_row.block_size, rest = static_cast<int>(kernel_row.cols % size);
  const bool by_packs = rest >= kPack * kLanes || rest == 0;
  Stepper stepper(call, kernel_row);
  typename Stepper::Waiting whole, long_rest;
  RestStepper rest_stepper(call, kernel_row);
  typename RestStepper::Waiting short_rest;
  const Formats formats(kernel_row);
  const float counted = *reinterpret_cast<const float*>(kernel_row.step);
  const Dither dither(counted);
  const Noise noise(kernel_row.noise_key, counted, 0);
  const int64_t blocks_per_row = (kernel_row.cols + size - 1) / size;
  int64_t row = begin / blocks_per_row, in_row = begin % blocks_per_row, skipped = 0;
  for (int64_t i = begin; i < end; ++i) {
    const auto add = [&](auto& to, auto& waiting, int n) __attribute__((always_inline)) {
      const int64_t col = in_row * size, offset = row * kernel_row.row_stride + col,
                    element = global_element(kernel_row, row, col);
      auto& block = waiting.blocks[waiting.count++];
      block.weights = weights_at(kernel_row, formats.weight, offset, noise.from(element));
      block.gradient = reinterpret_cast<const char*>(kernel_row.gradient) + bytes_of(formats.gradient) * offset;
      for (int k = 0; k < Rule::Kept::kCount; ++k) {
        block.codes[k] = reinterpret_cast<Code*>(kernel_row.codes[kSharesCodes<Codec> ? 0 : k]) + offset;
      }
      block.index = i;
      block.scale_index = row * kernel_row.scales_row_stride + in_row;
      block.dither = dither.from(element).offset;
      block.n = n;
      if (to.is_full(waiting, n)) skipped += to.step(waiting);
    };
    if (in_row < blocks_per_row - (rest != 0)) {
      add(stepper, whole, size);
    } else if (by_packs) {
      add(stepper, long_rest, rest);
    } else {
      add(rest_stepper, short_rest, rest);
    }
    if (++in_row == blocks_per_row) {
      in_row = 0;
      ++row;
    }
  }
  return skipped + stepper.step(whole) + stepper.step(long_rest) + rest_stepper.step(short_rest);
}

// Steps blocks of usual sizes by kernels of their own, and other blocks run by run.
template <class Rule, class Codec>
int64_t step_usual(const StepCall& call, const KernelRow& kernel_row, int64_t begin, int64_t end) {
  constexpr int kFew = 16 / kLanes;
  const int64_t longest = kernel_row.cols < kernel_row.block_size ? kernel_row.cols : kernel_row.block_size;
  CpuKernel kernel = step_runs;
  if (!kernel_row.cut && call.phase == Phase::kStep && longest <= BlockStepper<Rule, Codec, kFew>::kMost) {
    if (longest >= SHARDOPT_PACK * kLanes) {
      kernel = step_blocks<Rule, Codec, SHARDOPT_PACK>;
    } else if (Codec::Signed::kScales > 0) {  // codecs without blocks fill rows up to packs: runs are faster
      kernel = step_blocks<Rule, Codec, kFew>;
    }
  }
  return kernel(call, kernel_row, begin, end);
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
