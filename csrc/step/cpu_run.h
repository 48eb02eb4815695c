// The step of any kernel row on the CPU, run by run: consecutive blocks of a row, whose operands pass through the
// first-level cache as floats (step/cpu_passes.h). Serves all rules, codecs, formats, and cut blocks.
#pragma once

#include "step/cpu_call.h"
#include "step/cpu_passes.h"
#include "step/cpu_sums.h"
#include "step/instances.h"

SHARDOPT_BEGIN_NAMESPACE

constexpr int kRun = 512;  // elements of a run, unless the run is a single longer block
constexpr int kRunBlocks = kRun / kEach;
constexpr int kMaxScales = 2;  // per block

template <class... Codec>
const CodecPasses& passes_of_codec(int codec, List<Codec...>) {
  static const auto passes = [] {
    struct All {
      CodecPasses of[sizeof...(Codec)];
    };
    int index = 0;
    return All{{codec_passes<Codec>(index++, index_of<WideCodec<Codec>>(Codecs{}))...}};
  }();
  return passes.of[codec];
}

template <class... Rule>
const RulePasses& passes_of_rule(int rule, List<Rule...>) {
  static constexpr RulePasses passes[] = {rule_passes<Rule>()...};
  return passes[rule];
}

class RunStepper {
 public:
  RunStepper(const StepCall& call, const KernelRow& kernel_row)
      : kernel_row_(kernel_row),
        group_(call.groups[kernel_row.group]),
        phase_(call.phase),
        stores_(call.phase == Phase::kFinish || (call.phase == Phase::kStep && !kernel_row.cut)),
        formats_(kernel_row),
        dither_(*reinterpret_cast<const float*>(kernel_row.step)),
        rule_(passes_of_rule(group_.rule, Rules{})),
        codec_(passes_of_codec(kernel_row.codec, Codecs{})) {
    const float counted = *reinterpret_cast<const float*>(kernel_row.step);
    rule_.make(scalars_, group_.hyper, phase_ == Phase::kSums ? counted + 1.0f : counted);
    if (kernel_row.sums && phase_ != Phase::kSums && rule_.with_sums) {
      double sums[kMaxSums];
      for (int j = 0; j < rule_.sums; ++j) sums[j] = value_of(shared_sums()[j]);
      rule_.with_sums(scalars_, sums, kernel_row.numel);
    }
    for (int k = 0; k < rule_.moments; ++k) {
      const CodecPasses& of = codec_of(rule_.kinds[k]);
      coders_[k] = is_unsigned(rule_.kinds[k]) ? &of.of_unsigned : &of.of_signed;
      tables_[k] = call.tables[of.index];
      code_bytes_[k] = of.code_bytes;
    }
  }

  // Steps blocks [begin, end) of the kernel row, counted along its rows. Returns the number of skipped elements.
  int64_t step(int64_t begin, int64_t end) {
    const int64_t size = kernel_row_.block_size, per_row = (kernel_row_.cols + size - 1) / size;
    const int64_t longest = size < kRun ? kRun / size : 1;
    int64_t skipped = 0;
    while (begin < end) {
      const int64_t row = begin / per_row, in_row = begin % per_row;
      int64_t blocks = per_row - in_row < longest ? per_row - in_row : longest;
      if (end - begin < blocks) blocks = end - begin;
      skipped += step_run(row, in_row, blocks);
      begin += blocks;
    }
    if (phase_ == Phase::kSums) share_sums();
    return phase_ == Phase::kStep ? skipped : 0;
  }

 private:
  ExactSum* shared_sums() const { return reinterpret_cast<ExactSum*>(kernel_row_.sums); }

  // Adds this thread's sums to the shared ones; other threads do so, too.
  void share_sums() {
    constexpr int kWords = sizeof(ExactSum) / sizeof(int64_t);
    for (int j = 0; j < rule_.sums; ++j) {
      if (!rule_.with_sums) carry_once(sums_[j]);
      const auto from = reinterpret_cast<const int64_t*>(&sums_[j]);
      const auto to = reinterpret_cast<int64_t*>(shared_sums() + j);
      for (int i = 0; i < kWords; ++i) {
        if (from[i]) __atomic_fetch_add(to + i, from[i], __ATOMIC_RELAXED);
      }
    }
  }

  const CodecPasses& codec_of(MomentKind kind) const {
    if (kind == MomentKind::kExact) return passes_of_codec(kCodecIndex<Float32>, Codecs{});
    return kind == MomentKind::kWide ? passes_of_codec(codec_.wide, Codecs{}) : codec_;
  }

  bool is_relative(int k) const {
    return codec_.relative && rule_.first_unsigned >= 0 && rule_.kinds[k] == MomentKind::kSigned;
  }

  __attribute__((noinline)) int64_t step_run(int64_t row, int64_t in_row, int64_t blocks) {
    const int64_t col = in_row * kernel_row_.block_size, left = kernel_row_.cols - col;
    n_ = static_cast<int>(left < blocks * kernel_row_.block_size ? left : blocks * kernel_row_.block_size);
    blocks_ = static_cast<int>(blocks);
    offset_ = row * kernel_row_.row_stride + col;
    scale_index_ = row * kernel_row_.scales_row_stride + in_row;
    const int padded = (n_ + kEach - 1) / kEach * kEach;
    float* free = floats_;
    const auto take = [&] {
      float* taken = free;
      free += padded;
      return taken;
    };
    const int64_t element = global_element(kernel_row_, row, col);
    const Noise noise(kernel_row_.noise_key, *reinterpret_cast<const float*>(kernel_row_.step), element);
    const Weights weights = weights_at(kernel_row_, formats_.weight, offset_, noise);
    const bool in_place = formats_.weight == WeightFormat::kFloat32 && n_ == padded && stores_;
    run_.param = in_place ? reinterpret_cast<float*>(weights.words) : take();
    run_.gradient = take();
    for (int k = 0; k < rule_.moments; ++k) run_.moments[k] = take();
    if (!in_place) load_weights(run_.param, weights, formats_.weight, n_);
    const char* gradient = reinterpret_cast<const char*>(kernel_row_.gradient) + bytes_of(formats_.gradient) * offset_;
    load_gradient(run_.gradient, gradient, formats_.gradient, n_);
    const bool has_large = scale_gradient(run_, group_.gradient_scale, rule_.gains(scalars_), padded);
    decode(padded);
    const bool skips = has_large && group_.nonfinite == static_cast<int32_t>(NonFinite::kSkip);
    if (phase_ == Phase::kSums) {
      float* terms[2 * kMaxSums];
      const int count = rule_.products ? 2 * rule_.sums : rule_.sums;
      for (int j = 0; j < count; ++j) terms[j] = take();
      rule_.terms[codec_.root][skips](scalars_, run_, terms, padded);
      for (int j = 0; j < count; ++j) {
        for (int i = n_; i < padded; ++i) terms[j][i] = 0.0f;
      }
      for (int j = 0; j < rule_.sums; ++j) {
        if (rule_.products) {
          add_products(sums_[j], terms[j], terms[rule_.sums + j], padded);
        } else {
          add_squares(sums_[j], terms[j], padded);
        }
      }
      return 0;
    }
    const int64_t skipped = rule_.update[codec_.root][skips](scalars_, run_, padded);
    for (int k = 0; k < rule_.moments; ++k) {  // the rule's results for missing elements must not reach a coder
      for (int i = n_; i < padded; ++i) run_.moments[k][i] = 0.0f;
    }
    encode(padded, run_.gradient, dither_.from(element));
    if (stores_ && rule_.repay && codec_.relative) repay(padded, run_.gradient);
    if (stores_ && !in_place) store_weights(weights, run_.param, formats_.weight, n_);
    return skipped;
  }

  char* codes(int k) const { return reinterpret_cast<char*>(kernel_row_.codes[k]) + code_bytes_[k] * offset_; }
  float* scales(int k) const {
    return reinterpret_cast<float*>(kernel_row_.scales[k]) + coders_[k]->scales * scale_index_;
  }

  void decode(int padded) {
    for (int k = 0; k < rule_.moments; ++k) {
      coders_[k]->decode(run_.moments[k], codes(k), scales(k), tables_[k], n_, kernel_row_.block_size);
    }
    for (int k = 0; k < rule_.moments; ++k) {
      if (is_relative(k)) multiply(run_.moments[k], run_.moments[rule_.first_unsigned], padded);
    }
  }

  // unit: scratch memory, which receives the decoded root of a relative codec.
  void encode(int padded, float* unit, const Dither& dither) {
    for (int k = 0; k < rule_.moments; ++k) {
      if (is_relative(k)) continue;
      const bool is_unit = codec_.relative && k == rule_.first_unsigned;
      if (phase_ != Phase::kRelative || is_unit) encode_moment(k, Phase::kStep, unit, dither);
    }
    if (kernel_row_.cut && phase_ == Phase::kStep) return;  // the unit is not known yet
    for (int k = 0; k < rule_.moments; ++k) {
      if (!is_relative(k)) continue;
      divide_by_unit(run_.moments[k], run_.moments[rule_.first_unsigned], unit, padded);
      encode_moment(k, Phase::kRelative, unit, dither);
    }
  }

  // Measures the blocks and encodes them. measured_in: the phase in which the owners of a cut block exchange extremes.
  void encode_moment(int k, Phase measured_in, float* unit, const Dither& dither) {
    const CoderPasses& coder = *coders_[k];
    const float* x = run_.moments[k];
    const int size = kernel_row_.block_size;
    float new_scales[kMaxScales * kRunBlocks];
    for (int b = 0; coder.scales > 0 && b < blocks_; ++b) {
      const int begin = b * size, n = n_ - begin < size ? n_ - begin : size;
      Extremes extremes;
      Extremes* shared = reinterpret_cast<Extremes*>(kernel_row_.extremes[k]) + scale_index_ + b;
      if (kernel_row_.cut && phase_ != measured_in) {
        extremes = *shared;
      } else {
        extremes = extremes_of(x + begin, n, !is_unsigned(rule_.kinds[k]), coder.measures_smallest);
        if (kernel_row_.cut) *shared = extremes;
      }
      coder.measure(extremes, new_scales + b * coder.scales);
    }
    if (kernel_row_.cut && phase_ == Phase::kStep) return;
    const bool is_unit = codec_.relative && k == rule_.first_unsigned;
    if (!stores_ && !is_unit) return;
    coder.encode(x, stores_ ? codes(k) : nullptr, is_unit ? unit : nullptr, new_scales, tables_[k], n_, size, dither);
    if (!stores_) return;
    for (int i = 0; i < coder.scales * blocks_; ++i) scales(k)[i] = new_scales[i];
  }

  // Moves the parameters for the codes' rounding error, in units of the decoded root `unit`.
  void repay(int padded, const float* unit) {
    float* coded = run_.moments[rule_.first_unsigned];
    for (int k = 0; k < rule_.moments; ++k) {
      if (!is_relative(k)) continue;
      coders_[k]->decode(coded, codes(k), scales(k), tables_[k], n_, kernel_row_.block_size);
      rule_.repay(scalars_, run_.param, run_.moments[k], coded, unit, padded);
    }
  }

  const KernelRow& kernel_row_;
  const GroupRow& group_;
  const Phase phase_;
  const bool stores_;
  const Formats formats_;
  const Dither dither_;
  const RulePasses& rule_;
  const CodecPasses& codec_;
  const CoderPasses* coders_[kMaxMoments];
  const float* tables_[kMaxMoments];
  int code_bytes_[kMaxMoments];
  int n_ = 0, blocks_ = 0;  // elements and blocks of the run
  int64_t offset_ = 0, scale_index_ = 0;
  RunFloats run_;
  alignas(64) char scalars_[kRuleBytes];
  ExactSum sums_[kMaxSums] = {};
  alignas(64) float floats_[(kMaxMoments + 2 + 2 * kMaxSums) * kMaxBlock];
};

// Steps blocks [begin, end) of a kernel row; see CpuKernel.
inline int64_t step_runs(const StepCall& call, const KernelRow& kernel_row, int64_t begin, int64_t end) {
  if (call.phase == Phase::kSums ? !kernel_row.sums : call.phase != Phase::kStep && !kernel_row.cut) return 0;
  return RunStepper(call, kernel_row).step(begin, end);
}

SHARDOPT_END_NAMESPACE
