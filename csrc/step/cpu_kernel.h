// The step of a run of blocks on the CPU: one source, compiled once per instruction set (step/cpu_<target>.cpp) and
// left to the compiler to vectorize. Each block goes through its stages in arrays that stay in the first-level cache.
#pragma once

#include "step/cpu_call.h"
#include "step/instances.h"

SHARDOPT_BEGIN_NAMESPACE

#define SHARDOPT_INLINE inline __attribute__((always_inline))
#define SHARDOPT_LAMBDA_INLINE __attribute__((always_inline))
// No iteration of the loop depends on another.
#if defined(__clang__)
#define SHARDOPT_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define SHARDOPT_INDEPENDENT _Pragma("GCC ivdep")
#endif

SHARDOPT_INLINE void load_floats(float* __restrict to, const char* from, int32_t dtype, int64_t offset, int n) {
  switch (static_cast<DType>(dtype)) {
    case DType::kFloat32:
      __builtin_memcpy(to, from + 4 * offset, 4 * static_cast<size_t>(n));
      break;
    case DType::kBFloat16: {
      const uint16_t* source = reinterpret_cast<const uint16_t*>(from) + offset;
      for (int i = 0; i < n; ++i) to[i] = float_from_bf16(source[i]);
      break;
    }
    case DType::kFloat16: {
      const uint16_t* source = reinterpret_cast<const uint16_t*>(from) + offset;
      for (int i = 0; i < n; ++i) to[i] = float_from_fp16(source[i]);
      break;
    }
  }
}

SHARDOPT_INLINE void store_floats(char* to, const float* __restrict from, int32_t dtype, int64_t offset, int n) {
  switch (static_cast<DType>(dtype)) {
    case DType::kFloat32:
      __builtin_memcpy(to + 4 * offset, from, 4 * static_cast<size_t>(n));
      break;
    case DType::kBFloat16: {
      uint16_t* target = reinterpret_cast<uint16_t*>(to) + offset;
      for (int i = 0; i < n; ++i) target[i] = bf16_from_float(from[i]);
      break;
    }
    case DType::kFloat16: {
      uint16_t* target = reinterpret_cast<uint16_t*>(to) + offset;
      for (int i = 0; i < n; ++i) target[i] = fp16_from_float(from[i]);
      break;
    }
  }
}

template <bool kWithLow>
SHARDOPT_INLINE Extremes extremes_of(const float* x, int n) {
  int32_t high = 0, low = 0;
  for (int i = 0; i < n; ++i) {
    const int32_t b = magnitude_bits(x[i]);
    high = max_int(high, b);
    if (kWithLow) low = max_int(low, b == 0 ? 0 : kInfinityBits - b);
  }
  return {high, low};
}

template <class Rule, class Codec>
class BlockStepper {
  static constexpr int kMoments = Rule::Kept::kCount;
  static constexpr int kUnsigned = Rule::Kept::kUnsigned;
  static constexpr bool kRelative = Codec::kRelative && kUnsigned >= 0;
  using Code = typename Codec::Code;
  using Unsigned = typename Codec::Unsigned;
  using Signed = typename Codec::Signed;

 public:
  BlockStepper(const CpuCall& call, const TensorEntry& entry)
      : call_(call),
        entry_(entry),
        rule_(Rule::make(call.groups[entry.group].hyper, *reinterpret_cast<const float*>(entry.step))),
        gradient_scale_(call.groups[entry.group].gradient_scale),
        propagates_(call.groups[entry.group].nonfinite == static_cast<int32_t>(NonFinite::kPropagate)),
        table_(call.tables[entry.codec]),
        stores_(!entry.cut || call.phase == Phase::kFinish),
        param_(buffer_),
        gradient_(buffer_ + entry.block_size),
        root_(buffer_ + 2 * entry.block_size),
        moments_(buffer_ + 3 * entry.block_size) {}

  int64_t step(int64_t row, int64_t block, int64_t col, int n) {
    const int64_t offset = row * entry_.row_stride + col;
    const int64_t scale_index = row * entry_.scales_row_stride + block;
    load_floats(param_, reinterpret_cast<const char*>(entry_.param), entry_.param_dtype, offset, n);
    load_floats(gradient_, reinterpret_cast<const char*>(entry_.gradient), entry_.gradient_dtype, offset, n);
    decode(offset, scale_index, n);
    const int64_t nonfinite = update(n);
    if (stores_) store_floats(reinterpret_cast<char*>(entry_.param), param_, entry_.param_dtype, offset, n);
    encode(offset, scale_index, n);
    return nonfinite;
  }

 private:
  Code* codes(int moment, int64_t offset) const { return reinterpret_cast<Code*>(entry_.codes[moment]) + offset; }

  float* moment(int k) const { return moments_ + k * entry_.block_size; }

  template <class Coder>
  float* scales(int moment, int64_t scale_index) const {
    return reinterpret_cast<float*>(entry_.scales[moment]) + Coder::kScales * scale_index;
  }

  void decode(int64_t offset, int64_t scale_index, int n) {
    float* __restrict root = root_;
    if constexpr (kUnsigned >= 0) {
      const Unsigned coder(scales<Unsigned>(kUnsigned, scale_index), table_);
      const Code* __restrict source = codes(kUnsigned, offset);
      float* __restrict moment = this->moment(kUnsigned);
      SHARDOPT_INDEPENDENT
      for (int i = 0; i < n; ++i) {
        const float x = coder.decode(source[i]);
        root[i] = x;
        moment[i] = Codec::kRoot ? x * x : x;
      }
    }
    for (int k = 0; k < kMoments; ++k) {
      if (k == kUnsigned) continue;
      const Signed coder(scales<Signed>(k, scale_index), table_);
      const Code* __restrict source = codes(k, offset);
      float* __restrict moment = this->moment(k);
      SHARDOPT_INDEPENDENT
      for (int i = 0; i < n; ++i) {
        const float x = coder.decode(source[i]);
        moment[i] = kRelative ? x * root[i] : x;
      }
    }
  }

  // Applies the rule; elements whose gradient is not finite keep parameter and moments. Returns how many there were.
  int64_t update(int n) {
    const Rule rule = rule_;
    const float scale = gradient_scale_;
    float* __restrict param = param_;
    float* __restrict gradient = gradient_;
    float* __restrict root = root_;
    float* __restrict moment0 = moment(0);
    float* __restrict moment1 = moment(kMoments > 1 ? 1 : 0);
    const auto apply = [=](int i) SHARDOPT_LAMBDA_INLINE {
      float moment[kMaxMoments] = {};
      if (kMoments > 0) moment[0] = moment0[i];
      if (kMoments > 1) moment[1] = moment1[i];
      rule.update(param[i], gradient[i], moment, root[i]);
      if (kMoments > 0) moment0[i] = moment[0];
      if (kMoments > 1) moment1[i] = moment[1];
    };
    int32_t largest = 0;
    SHARDOPT_INDEPENDENT
    for (int i = 0; i < n; ++i) {
      const float g = gradient[i] * scale;
      gradient[i] = g;
      largest = max_int(largest, magnitude_bits(g));
    }
    if (largest < kInfinityBits || propagates_) {
      SHARDOPT_INDEPENDENT
      for (int i = 0; i < n; ++i) apply(i);
      return 0;
    }
    int64_t count = 0;
    for (int i = 0; i < n; ++i) {
      if (is_finite(gradient[i])) {
        apply(i);
      } else {
        ++count;
      }
    }
    return count;
  }

  // The block's extremes: measured, or after the exchange those that all owners of a cut block agreed on.
  template <class Coder, bool kWithLow>
  Extremes extremes(int moment, int64_t scale_index, const float* x, int n, Phase measured_in) const {
    if (Coder::kScales == 0) return {};
    if (!entry_.cut) return extremes_of<kWithLow>(x, n);
    Extremes* shared = reinterpret_cast<Extremes*>(entry_.extremes[moment]) + scale_index;
    if (call_.phase == measured_in) *shared = extremes_of<kWithLow>(x, n);
    return *shared;
  }

  template <class Coder>
  static void encode_with(const Coder coder, const float* __restrict x, Code* __restrict target, int n) {
    SHARDOPT_INDEPENDENT
    for (int i = 0; i < n; ++i) target[i] = coder.encode(x[i]);
  }

  void encode(int64_t offset, int64_t scale_index, int n) {
    if constexpr (kUnsigned >= 0) {
      const float* x = Codec::kRoot ? root_ : moment(kUnsigned);
      const Extremes e = extremes<Unsigned, true>(kUnsigned, scale_index, x, n, Phase::kStep);
      float scale[Unsigned::kScales + 1] = {};
      Unsigned::measure(e, scale);
      const Unsigned coder(scale, table_);
      Code* target = stores_ ? codes(kUnsigned, offset) : scratch_;
      encode_with(coder, x, target, n);
      if (stores_) __builtin_memcpy(scales<Unsigned>(kUnsigned, scale_index), scale, 4 * Unsigned::kScales);
      if (kRelative) {
        const Code* __restrict coded = target;
        float* __restrict root = root_;
        SHARDOPT_INDEPENDENT
        for (int i = 0; i < n; ++i) root[i] = coder.decode(coded[i]);
      }
    }
    if (kRelative && entry_.cut && call_.phase == Phase::kStep) return;  // the root's code is not known yet
    for (int k = 0; k < kMoments; ++k) {
      if (k == kUnsigned) continue;
      float* __restrict moment = this->moment(k);
      if (kRelative) {
        const float* __restrict root = root_;
        SHARDOPT_INDEPENDENT
        for (int i = 0; i < n; ++i) moment[i] = root[i] > 0.0f ? moment[i] / root[i] : 0.0f;
      }
      const Extremes e =
          extremes<Signed, false>(k, scale_index, moment, n, kRelative ? Phase::kRelative : Phase::kStep);
      if (!stores_) continue;
      float scale[Signed::kScales + 1] = {};
      Signed::measure(e, scale);
      encode_with(Signed(scale, table_), moment, codes(k, offset), n);
      __builtin_memcpy(scales<Signed>(k, scale_index), scale, 4 * Signed::kScales);
    }
  }

  const CpuCall& call_;
  const TensorEntry& entry_;
  const Rule rule_;
  const float gradient_scale_;
  const bool propagates_;
  const float* const table_;
  const bool stores_;

  // One block's values, each array as long as the block: neighbours in the cache rather than pages apart.
  alignas(64) float buffer_[(kMoments + 3) * kMaxBlock];
  float* const param_;
  float* const gradient_;
  float* const root_;
  float* const moments_;
  alignas(64) Code scratch_[kMaxBlock];
};

template <class Rule, class Codec>
int64_t step_blocks(const CpuCall& call, const TensorEntry& entry, int64_t begin, int64_t end) {
  if (call.phase != Phase::kStep && !entry.cut) return 0;
  BlockStepper<Rule, Codec> stepper(call, entry);
  const int64_t blocks_per_row = (entry.cols + entry.block_size - 1) / entry.block_size;
  int64_t nonfinite = 0;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = i / blocks_per_row;
    const int64_t block = i % blocks_per_row;
    const int64_t col = block * entry.block_size;
    const int64_t left = entry.cols - col;
    nonfinite += stepper.step(row, block, col, static_cast<int>(left < entry.block_size ? left : entry.block_size));
  }
  return call.phase == Phase::kStep ? nonfinite : 0;
}

template <class Codec, class... Rule>
CpuKernel kernel_of_rule(int rule, List<Rule...>) {
  constexpr CpuKernel kernels[] = {step_blocks<Rule, Codec>...};
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
