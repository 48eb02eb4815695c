// The step of a run of blocks on the CPU: one source over the vectors of core/lanes.h, compiled once per instruction
// set (step/cpu_<target>.cpp).
//
// A block is read, updated and its parameters written in one pass; its new moments wait in registers or the first-level
// cache for the scales, and are encoded from there.
#pragma once

#include "step/cpu_call.h"
#include "step/instances.h"

SHARDOPT_BEGIN_NAMESPACE

SHARDOPT_HD Floats load_floats(const char* from, DType dtype, int i) {
  switch (dtype) {
    case DType::kFloat32:
      return load_lanes(reinterpret_cast<const float*>(from) + i);
    case DType::kBFloat16:
      return float_from_bf16(load_lanes(reinterpret_cast<const uint16_t*>(from) + i));
    default:
      return float_from_fp16(load_lanes(reinterpret_cast<const uint16_t*>(from) + i));
  }
}

SHARDOPT_HD void store_floats(char* to, Floats x, DType dtype, int i) {
  switch (dtype) {
    case DType::kFloat32:
      return store_lanes(reinterpret_cast<float*>(to) + i, x);
    case DType::kBFloat16:
      return store_lanes(reinterpret_cast<uint16_t*>(to) + i, bf16_from_float(x));
    default:
      return store_lanes(reinterpret_cast<uint16_t*>(to) + i, fp16_from_float(x));
  }
}

constexpr int bytes_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// The extremes of some vectors, lane by lane.
struct LaneExtremes {
  Ints high{}, low{};

  SHARDOPT_HD void add_high(Floats x) { high = max_int(high, magnitude_bits(x)); }

  SHARDOPT_HD void add(Floats x) {
    const Ints b = magnitude_bits(x);
    high = max_int(high, b);
    low = max_int(low, select(b == 0, Ints{}, kInfinityBits - b));
  }

  SHARDOPT_HD Extremes over_lanes() const { return {largest(high), largest(low)}; }
};

// Steps blocks of one entry. kVectors: vectors in a whole block, or 0 for any number.
template <class Rule, class Codec, int kVectors>
class BlockStepper {
  static constexpr int kMoments = Rule::Kept::kCount;
  static constexpr int kUnsigned = Rule::Kept::kUnsigned;
  static constexpr bool kRelative = Codec::kRelative && kUnsigned >= 0;
  static constexpr int kCapacity = (kVectors ? kVectors : kMaxBlock / kLanes);
  using Code = typename Codec::Code;
  using Unsigned = typename Codec::Unsigned;
  using Signed = typename Codec::Signed;
  static constexpr bool kBlockwise = Signed::kScales > 0;

  // Where a block's elements are: in the tensors, or for a short block in a copy that is filled up to whole vectors.
  struct Place {
    char* param;
    const char* gradient;
    Code* codes[kMoments + 1];
    int vectors;
  };

 public:
  BlockStepper(const CpuCall& call, const TensorEntry& entry)
      : entry_(entry),
        phase_(call.phase),
        rule_(Rule::make(call.groups[entry.group].hyper, *reinterpret_cast<const float*>(entry.step))),
        gradient_scale_(call.groups[entry.group].gradient_scale),
        propagates_(call.groups[entry.group].nonfinite == static_cast<int32_t>(NonFinite::kPropagate)),
        table_(call.tables[entry.codec]),
        param_dtype_(static_cast<DType>(entry.weight_format)),
        gradient_dtype_(static_cast<DType>(entry.gradient_dtype)),
        stores_(!entry.cut || call.phase == Phase::kFinish) {}

  // Steps `n` elements of a row from column `col` on: a block. Returns how many elements were skipped.
  int64_t step(int64_t row, int64_t block, int64_t col, int n) {
    const int64_t offset = row * entry_.row_stride + col;
    scale_index_ = row * entry_.scales_row_stride + block;
    Place place{};
    place.param = reinterpret_cast<char*>(entry_.param) + bytes_of(param_dtype_) * offset;
    place.gradient = reinterpret_cast<const char*>(entry_.gradient) + bytes_of(gradient_dtype_) * offset;
    for (int k = 0; k < kMoments; ++k) place.codes[k] = reinterpret_cast<Code*>(entry_.codes[k]) + offset;
    place.vectors = n / kLanes;
    if (n % kLanes == 0 && (kVectors == 0 || place.vectors == kVectors)) return step_at<kVectors>(place);
    return step_in_copy(place, n);
  }

 private:
  template <class Coder>
  float* scales(int moment) const {
    return reinterpret_cast<float*>(entry_.scales[moment]) + Coder::kScales * scale_index_;
  }

  int64_t step_in_copy(const Place& place, int n) {
    alignas(64) char param[4 * kMaxBlock], gradient[4 * kMaxBlock];
    alignas(64) Code codes[kMoments + 1][kMaxBlock];
    Place copy{param, gradient, {}, (n + kLanes - 1) / kLanes};
    const uint64_t padded = static_cast<uint64_t>(copy.vectors) * kLanes, count = static_cast<uint64_t>(n);
    const uint64_t param_bytes = bytes_of(param_dtype_), gradient_bytes = bytes_of(gradient_dtype_);
    __builtin_memset(param + param_bytes * count, 0, param_bytes * (padded - count));
    __builtin_memset(gradient + gradient_bytes * count, 0, gradient_bytes * (padded - count));
    __builtin_memcpy(param, place.param, param_bytes * count);
    __builtin_memcpy(gradient, place.gradient, gradient_bytes * count);
    for (int k = 0; k < kMoments; ++k) {
      copy.codes[k] = codes[k];
      const Code zero = k == kUnsigned ? Code{} : static_cast<Code>(Signed::kZero);
      __builtin_memcpy(codes[k], place.codes[k], sizeof(Code) * count);
      for (uint64_t i = count; i < padded; ++i) codes[k][i] = zero;
    }
    const int64_t nonfinite = step_at<0>(copy);
    if (stores_) {
      __builtin_memcpy(place.param, param, param_bytes * count);
      for (int k = 0; k < kMoments; ++k) __builtin_memcpy(place.codes[k], codes[k], sizeof(Code) * count);
    }
    return nonfinite;
  }

  template <int kStatic>
  SHARDOPT_HD int64_t step_at(const Place& place) {
    const int vectors = kStatic ? kStatic : place.vectors;
    Ints largest_gradient{};
    if (!propagates_) {
      for (int i = 0; i < vectors; ++i)
        largest_gradient = max_int(largest_gradient, magnitude_bits(gradient_at(place, i)));
    }
    if (largest(largest_gradient) < kLargeGradientBits) {
      update<false>(place, vectors);
      if constexpr (kBlockwise) encode(place, vectors);
      return 0;
    }
    const int64_t nonfinite = update<true>(place, vectors);
    if constexpr (kBlockwise) encode(place, vectors);
    return nonfinite;
  }

  SHARDOPT_HD Floats gradient_at(const Place& place, int i) const {
    return load_floats(place.gradient, gradient_dtype_, i * kLanes) * gradient_scale_;
  }

  // Reads the block, applies the rule and writes the parameters; the new moments are kept and, without blocks, encoded.
  // kSkips: elements whose update is lost keep parameter and moments; returns how many they are.
  template <bool kSkips>
  SHARDOPT_HD int64_t update(const Place& place, int vectors) {
    const Rule rule = rule_;
    const Unsigned unsigned_coder(kUnsigned >= 0 ? scales<Unsigned>(kUnsigned) : kNoScales, table_);
    LaneExtremes extremes[kMoments + 1];
    Ints skipped{};
    for (int i = 0; i < vectors; ++i) {
      const int at = i * kLanes;
      Floats param = load_floats(place.param, param_dtype_, at);
      const Floats gradient = gradient_at(place, i);
      Floats moment[kMoments + 1], root{};
      if constexpr (kUnsigned >= 0) {
        root = unsigned_coder.decode(load_lanes(place.codes[kUnsigned] + at));
        moment[kUnsigned] = Codec::kRoot ? root * root : root;
      }
      for (int k = 0; k < kMoments; ++k) {
        if (k == kUnsigned) continue;
        const Floats x = Signed(scales<Signed>(k), table_).decode(load_lanes(place.codes[k] + at));
        moment[k] = kRelative ? x * root : x;
      }
      if constexpr (kSkips) {
        const Floats old_param = param, old_root = root;
        Floats old_moment[kMoments + 1];
        for (int k = 0; k < kMoments; ++k) old_moment[k] = moment[k];
        rule.update(param, gradient, moment, root);
        const Ints lost = is_lost<kMoments>(gradient, param, moment);
        skipped -= lost;
        param = select(lost, old_param, param);
        root = select(lost, old_root, root);
        for (int k = 0; k < kMoments; ++k) moment[k] = select(lost, old_moment[k], moment[k]);
      } else {
        rule.update(param, gradient, moment, root);
      }
      if (stores_) store_floats(place.param, param, param_dtype_, at);
      for (int k = 0; k < kMoments; ++k) {
        const Floats x = Codec::kRoot && k == kUnsigned ? root : moment[k];
        if constexpr (!kBlockwise) {
          store_lanes(place.codes[k] + at, encoder(k == kUnsigned, x));
        } else {
          kept_[k][i] = x;
          if (k == kUnsigned) {
            extremes[k].add(x);
          } else if (!kRelative) {
            extremes[k].add_high(x);
          }
        }
      }
    }
    for (int k = 0; k < kMoments; ++k) extremes_[k] = extremes[k].over_lanes();
    int64_t count = 0;
    if (kSkips) {
      for (int i = 0; i < kLanes; ++i) count += skipped[i];
    }
    return count;
  }

  // Without blocks there are no scales.
  SHARDOPT_HD auto encoder(bool is_unsigned, Floats x) const {
    return is_unsigned ? Unsigned(kNoScales, table_).encode(x) : Signed(kNoScales, table_).encode(x);
  }

  // The extremes that the block's scales come from: after the exchange those that all owners of a cut block agreed on.
  SHARDOPT_HD Extremes agreed(int moment, Phase measured_in) const {
    if (!entry_.cut) return extremes_[moment];
    Extremes* shared = reinterpret_cast<Extremes*>(entry_.extremes[moment]) + scale_index_;
    if (phase_ == measured_in) *shared = extremes_[moment];
    return *shared;
  }

  SHARDOPT_HD void encode(const Place& place, int vectors) {
    if constexpr (kUnsigned >= 0) {
      float scale[Unsigned::kScales + 1];
      Unsigned::measure(agreed(kUnsigned, Phase::kStep), scale);
      const Unsigned coder(scale, table_);
      LaneExtremes extremes[kMoments + 1];
      for (int i = 0; i < vectors; ++i) {
        const Ints code = coder.encode(kept_[kUnsigned][i]);
        if (stores_) store_lanes(place.codes[kUnsigned] + i * kLanes, code);
        if (!kRelative) continue;
        const Floats unit = coder.decode(code);
        for (int k = 0; k < kMoments; ++k) {
          if (k == kUnsigned) continue;
          kept_[k][i] = select(unit > 0.0f, kept_[k][i] / unit, Floats{});
          extremes[k].add_high(kept_[k][i]);
        }
      }
      if (stores_) store_scales<Unsigned>(kUnsigned, scale);
      if (kRelative) {
        if (entry_.cut && phase_ == Phase::kStep) return;  // the unit is not known yet
        for (int k = 0; k < kMoments; ++k) {
          if (k != kUnsigned) extremes_[k] = extremes[k].over_lanes();
        }
      }
    }
    for (int k = 0; k < kMoments; ++k) {
      if (k == kUnsigned) continue;
      float scale[Signed::kScales + 1];
      Signed::measure(agreed(k, kRelative ? Phase::kRelative : Phase::kStep), scale);
      if (!stores_) continue;
      const Signed coder(scale, table_);
      for (int i = 0; i < vectors; ++i) store_lanes(place.codes[k] + i * kLanes, coder.encode(kept_[k][i]));
      store_scales<Signed>(k, scale);
    }
  }

  template <class Coder>
  SHARDOPT_HD void store_scales(int moment, const float* scale) const {
    for (int i = 0; i < Coder::kScales; ++i) scales<Coder>(moment)[i] = scale[i];
  }

  // For the coder of a moment that the rule does not keep, or of a codec without blocks.
  static constexpr float kNoScales[2] = {};

  const TensorEntry& entry_;
  const Phase phase_;
  const Rule rule_;
  const float gradient_scale_;
  const bool propagates_;
  const float* const table_;
  const DType param_dtype_, gradient_dtype_;
  const bool stores_;
  int64_t scale_index_ = 0;
  Extremes extremes_[kMoments + 1];
  Floats kept_[kMoments + 1][kMaxBlock / kLanes];  // signed moments, the unsigned one or its root
};

template <class Rule, class Codec, int kVectors>
int64_t step_range(const CpuCall& call, const TensorEntry& entry, int64_t begin, int64_t end) {
  BlockStepper<Rule, Codec, kVectors> stepper(call, entry);
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

template <class Rule, class Codec>
int64_t step_blocks(const CpuCall& call, const TensorEntry& entry, int64_t begin, int64_t end) {
  if (call.phase != Phase::kStep && !entry.cut) return 0;
  if (Codec::Signed::kScales > 0 && entry.block_size == 128) {
    return step_range<Rule, Codec, 128 / kLanes>(call, entry, begin, end);
  }
  return step_range<Rule, Codec, 0>(call, entry, begin, end);
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
