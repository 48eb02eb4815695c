// The step of a run of blocks on the CPU: one source over the vectors of core/lanes.h, compiled once per instruction
// set (step/cpu_<target>.cpp).
//
// A block is read, updated and its weights written in one pass; its new moments wait in the first-level cache for the
// scales, and are encoded from there.
#pragma once

#include "step/cpu_call.h"
#include "step/cpu_memory.h"
#include "step/instances.h"

SHARDOPT_BEGIN_NAMESPACE

// The rule's scalars. Entries mostly share them with the one before, and to make them takes longer than to step a small
// entry, so that each thread keeps the last ones.
template <class Rule>
Rule rule_of(const double* hyper, float step) {
  struct Made {
    double hyper[kMaxHyper];
    float step;
    Rule rule;
  };
  static thread_local Made last{{}, __builtin_nanf(""), {}};
  if (last.step != step || __builtin_memcmp(last.hyper, hyper, sizeof last.hyper) != 0) {
    __builtin_memcpy(last.hyper, hyper, sizeof last.hyper);
    last.step = step;
    last.rule = Rule::make(hyper, step);
  }
  return last.rule;
}

// Steps blocks of one entry. kWhole: elements in a whole block, or 0 for any number.
template <class Rule, class Codec, class Format, int kPack, int kWhole>
class BlockStepper {
  static constexpr int kMoments = Rule::Kept::kCount;
  static constexpr int kUnsigned = Rule::Kept::kUnsigned;
  static constexpr int kSigned = kUnsigned == 0 ? 1 : 0;  // no rule keeps more than one
  static constexpr bool kRelative = Codec::kRelative && kUnsigned >= 0;
  static constexpr int kStep = kPack * kLanes;
  static_assert(kWhole % kStep == 0, "a whole block is a number of packs");
  static constexpr int kCapacity = (kWhole ? kWhole : kMaxBlock) / kStep;
  using Code = typename Codec::Code;
  using Unsigned = typename Codec::Unsigned;
  using Signed = typename Codec::Signed;
  using F = Floats<kPack>;
  using I = Ints<kPack>;
  static constexpr bool kHasSigned = kMoments > (kUnsigned >= 0);
  // Where the one maximum waits for the other, several blocks go together: the processor works on the next one
  // meanwhile.
  static constexpr int kTogether = kWhole > 0 && kRelative ? 4 : 1;
  static constexpr bool kBlockwise = Signed::kScales > 0;

  // What is known of a block between the passes.
  struct Kept {
    LaneExtremes extremes[kMoments + 1];
    F x[kMoments + 1][kCapacity];  // signed moments, the unsigned one or its root
  };

  // Where a block is: in the tensors, or for a short block in a copy that is filled up to whole packs.
  struct Block {
    Weights weights;
    const char* gradient;
    Code* codes[kMoments + 1];
    int64_t scale_index;
    int n;  // elements
  };

 public:
  BlockStepper(const CpuCall& call, const TensorEntry& entry)
      : entry_(entry),
        phase_(call.phase),
        stores_(!entry.cut || call.phase == Phase::kFinish),
        propagates_(call.groups[entry.group].nonfinite == static_cast<int32_t>(NonFinite::kPropagate)),
        rule_(rule_of<Rule>(call.groups[entry.group].hyper, *reinterpret_cast<const float*>(entry.step))),
        gradient_scale_(call.groups[entry.group].gradient_scale),
        table_(call.tables[entry.codec]),
        format_(entry),
        signed_table_(table_),
        unsigned_table_(table_) {}

  // Steps blocks [begin, end), counted along the rows. Returns how many elements were skipped.
  int64_t step(int64_t begin, int64_t end) {
    const int64_t blocks_per_row = (entry_.cols + entry_.block_size - 1) / entry_.block_size;
    int64_t row = begin / blocks_per_row, in_row = begin % blocks_per_row, nonfinite = 0;
    Block whole[kTogether];
    int waiting = 0;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t col = in_row * entry_.block_size, left = entry_.cols - col;
      const Block block = at(row, in_row, col, static_cast<int>(left < entry_.block_size ? left : entry_.block_size));
      if (block.n % kStep != 0) {
        nonfinite += step_in_copy(block);
      } else if (kWhole != 0 && block.n != kWhole) {
        nonfinite += step_short(block);
      } else {
        whole[waiting++] = block;
        if (waiting == kTogether) {
          nonfinite += step_at<kWhole, kTogether>(whole);
          waiting = 0;
        }
      }
      if (++in_row == blocks_per_row) {
        in_row = 0;
        ++row;
      }
    }
    for (int i = 0; i < waiting; ++i) nonfinite += step_at<kWhole, 1>(whole + i);
    return nonfinite;
  }

 private:
  Block at(int64_t row, int64_t in_row, int64_t col, int n) const {
    const int64_t offset = row * entry_.row_stride + col;
    Block block;
    block.weights = format_.weights(entry_, row, col, offset);
    block.gradient = reinterpret_cast<const char*>(entry_.gradient) + bytes_of(format_.gradient()) * offset;
    for (int k = 0; k < kMoments; ++k) block.codes[k] = reinterpret_cast<Code*>(entry_.codes[k]) + offset;
    block.scale_index = row * entry_.scales_row_stride + in_row;
    block.n = n;
    return block;
  }

  template <class Coder>
  SHARDOPT_HD float* scales(int moment, const Block& block) const {
    return reinterpret_cast<float*>(entry_.scales[moment]) + Coder::kScales * block.scale_index;
  }

  // Out of line: the buffers are large.
  __attribute__((noinline)) int64_t step_in_copy(const Block& block) {
    alignas(64) char weights[4 * kMaxBlock], low_bits[2 * kMaxBlock], gradient[4 * kMaxBlock];
    alignas(64) Code codes[kMoments + 1][kMaxBlock];
    Block copy = block;
    copy.n = (block.n + kStep - 1) / kStep * kStep;
    const auto count = static_cast<uint64_t>(block.n), padded = static_cast<uint64_t>(copy.n);
    const auto fill = [&](char* to, const char* from, uint64_t bytes) {
      if (bytes == 0) return;
      __builtin_memcpy(to, from, bytes * count);
      __builtin_memset(to + bytes * count, 0, bytes * (padded - count));
    };
    const uint64_t weight_bytes = bytes_of(format_.weight()), low_bytes = low_bytes_of(format_.weight());
    fill(weights, block.weights.words, weight_bytes);
    fill(low_bits, block.weights.low_bits, low_bytes);
    fill(gradient, block.gradient, bytes_of(format_.gradient()));
    copy.weights.words = weights;
    copy.weights.low_bits = low_bits;
    copy.gradient = gradient;
    for (int k = 0; k < kMoments; ++k) {
      copy.codes[k] = codes[k];
      const Code zero = k == kUnsigned ? Code{} : static_cast<Code>(Signed::kZero);
      __builtin_memcpy(codes[k], block.codes[k], sizeof(Code) * count);
      for (uint64_t i = count; i < padded; ++i) codes[k][i] = zero;
    }
    const int64_t nonfinite = step_short(copy);
    if (stores_) {
      __builtin_memcpy(block.weights.words, weights, weight_bytes * count);
      if (low_bytes) __builtin_memcpy(block.weights.low_bits, low_bits, low_bytes * count);
      for (int k = 0; k < kMoments; ++k) __builtin_memcpy(block.codes[k], codes[k], sizeof(Code) * count);
    }
    return nonfinite;
  }

  __attribute__((noinline)) int64_t step_short(const Block& block) { return step_at<0, 1>(&block); }

  template <int kStatic, int kCount>
  SHARDOPT_HD int64_t step_at(const Block* blocks) {
    const int n = kStatic ? kStatic : blocks[0].n;
    Kept kept[kCount];
    int64_t nonfinite = 0;
#pragma GCC unroll 1
    for (int b = 0; b < kCount; ++b) {
      if (has_large_gradient(blocks[b], n)) {
        nonfinite += update<true>(blocks[b], n, kept[b]);
      } else {
        update<false>(blocks[b], n, kept[b]);
      }
    }
    if constexpr (kBlockwise) encode<kCount>(blocks, n, kept);
    return nonfinite;
  }

  SHARDOPT_HD bool has_large_gradient(const Block& block, int n) const {
    return !propagates_ &&
           any_at_least<kPack>(block.gradient, format_.gradient(), n, gradient_scale_, kLargeGradientBits);
  }

  SHARDOPT_HD F gradient_at(const Block& block, int i) const {
    return load_floats<kPack>(block.gradient, format_.gradient(), i) * gradient_scale_;
  }

  // Reads the block, applies the rule and writes the weights; the new moments are kept and, without blocks, encoded.
  // kSkips: elements whose update is lost keep weight and moments; returns how many they are.
  template <bool kSkips>
  SHARDOPT_HD int64_t update(const Block& block, int n, Kept& kept) const {
    const Rule rule = rule_;
    const bool stores = kAlwaysStores || stores_;
    const Unsigned unsigned_coder(kUnsigned >= 0 ? scales<Unsigned>(kUnsigned, block) : kNoScales, table_);
    const Signed signed_coder(kHasSigned ? scales<Signed>(kSigned, block) : kNoScales, table_);
    LaneExtremes extremes[kMoments + 1];
    int64_t skipped = 0;
    for (int i = 0; i < n; i += kStep) {
      F moment[kMoments + 1], root{};
      for (int k = 0; k < kMoments; ++k) {
        if constexpr (!kBlockwise) {
          moment[k] = signed_coder.decode(load_lanes<kPack>(block.codes[k] + i));
        } else if (k == kUnsigned) {
          moment[k] = unsigned_table_.decode(unsigned_coder, block.codes[k] + i);
        } else {
          moment[k] = signed_table_.decode(signed_coder, block.codes[k] + i);
        }
      }
      if constexpr (kUnsigned >= 0) {
        root = moment[kUnsigned];
        if (kRelative) moment[kSigned] = moment[kSigned] * root;
        if (Codec::kRoot) moment[kUnsigned] = root * root;
      }
      F weight = block.weights.template load<kPack>(format_.weight(), i);
      const F gradient = gradient_at(block, i);
      if constexpr (kSkips) {
        const F old_weight = weight, old_root = root;
        F old_moment[kMoments + 1];
        for (int k = 0; k < kMoments; ++k) old_moment[k] = moment[k];
        rule.update(weight, gradient, moment, root);
        const auto lost = is_lost<kMoments>(gradient, weight, moment);
        skipped += count(lost);
        weight = select(lost, old_weight, weight);
        root = select(lost, old_root, root);
        for (int k = 0; k < kMoments; ++k) moment[k] = select(lost, old_moment[k], moment[k]);
      } else {
        rule.update(weight, gradient, moment, root);
      }
      if (stores) block.weights.store(weight, format_.weight(), i);
      for (int k = 0; k < kMoments; ++k) {
        const F x = Codec::kRoot && k == kUnsigned ? root : moment[k];
        if constexpr (!kBlockwise) {
          store_lanes(block.codes[k] + i, k == kUnsigned ? unsigned_coder.encode(x) : signed_coder.encode(x));
        } else {
          kept.x[k][i / kStep] = x;
          if (k == kUnsigned) {
            extremes[k].template add_unsigned<Unsigned::kMeasuresSmallest>(x);
          } else if (!kRelative) {
            extremes[k].add_signed(x);
          }
        }
      }
    }
    for (int k = 0; k < kMoments; ++k) kept.extremes[k] = extremes[k];
    return skipped;
  }

  // The extremes that the block's scales come from: after the exchange those that all owners of a cut block agreed on.
  SHARDOPT_HD Extremes agreed(const Block& block, const LaneExtremes& found, int moment, Phase measured_in) const {
    const Extremes own = found.over_lanes();
    if (kAlwaysStores || !entry_.cut) return own;
    Extremes* shared = reinterpret_cast<Extremes*>(entry_.extremes[moment]) + block.scale_index;
    if (phase_ == measured_in) *shared = own;
    return *shared;
  }

  template <int kCount>
  SHARDOPT_HD void encode(const Block* blocks, int n, Kept* kept) const {
    const bool stores = kAlwaysStores || stores_;
    float unsigned_scale[kCount][Unsigned::kScales + 1], signed_scale[kCount][Signed::kScales + 1];
#pragma GCC unroll 1
    for (int b = 0; b < kCount; ++b) {
      if constexpr (kUnsigned >= 0) {
        Unsigned::measure(agreed(blocks[b], kept[b].extremes[kUnsigned], kUnsigned, Phase::kStep), unsigned_scale[b]);
      }
      if constexpr (kHasSigned && !kRelative) {
        Signed::measure(agreed(blocks[b], kept[b].extremes[kSigned], kSigned, Phase::kStep), signed_scale[b]);
      }
    }
    if constexpr (kUnsigned >= 0) {
#pragma GCC unroll 1
      for (int b = 0; b < kCount; ++b) {
        const Unsigned coder(unsigned_scale[b], table_);
        LaneExtremes extremes;
        for (int i = 0; i < n; i += kStep) {
          const F x = kept[b].x[kUnsigned][i / kStep];
          if constexpr (kRelative) {
            F unit, &moment = kept[b].x[kSigned][i / kStep];
            const I code = coder.encode(x, unit);
            if (stores) store_lanes(blocks[b].codes[kUnsigned] + i, code);
            moment = select(bits(x) == 0, F{}, moment * reciprocal(unit));
            extremes.add_signed(moment);
          } else if (stores) {
            store_lanes(blocks[b].codes[kUnsigned] + i, unsigned_table_.encode(coder, x));
          }
        }
        if (kRelative) kept[b].extremes[kSigned] = extremes;
      }
#pragma GCC unroll 1
      for (int b = 0; b < kCount; ++b) {
        if (stores) store_scales<Unsigned>(kUnsigned, blocks[b], unsigned_scale[b]);
      }
      if (!kAlwaysStores && kRelative && entry_.cut && phase_ == Phase::kStep) return;  // the unit is not known yet
    }
    if constexpr (kHasSigned) {
      if constexpr (kRelative) {
#pragma GCC unroll 1
        for (int b = 0; b < kCount; ++b) {
          Signed::measure(agreed(blocks[b], kept[b].extremes[kSigned], kSigned, Phase::kRelative), signed_scale[b]);
        }
      }
      if (!stores) return;
#pragma GCC unroll 1
      for (int b = 0; b < kCount; ++b) {
        const Signed coder(signed_scale[b], table_);
        for (int i = 0; i < n; i += kStep) {
          store_lanes(blocks[b].codes[kSigned] + i, signed_table_.encode(coder, kept[b].x[kSigned][i / kStep]));
        }
        store_scales<Signed>(kSigned, blocks[b], signed_scale[b]);
      }
    }
  }

  template <class Coder>
  SHARDOPT_HD void store_scales(int moment, const Block& block, const float* scale) const {
    for (int i = 0; i < Coder::kScales; ++i) scales<Coder>(moment, block)[i] = scale[i];
  }

  static constexpr bool kAlwaysStores = Format::kNeverCut;
  // For the coder of a moment that the rule does not keep, or of a codec without blocks.
  static constexpr float kNoScales[2] = {};

  const TensorEntry& entry_;
  const Phase phase_;
  const bool stores_, propagates_;
  const Rule rule_;
  const float gradient_scale_;
  const float* const table_;
  const Format format_;
  const FastTable<Signed, kPack> signed_table_;
  const FastTable<Unsigned, kPack> unsigned_table_;
};

template <class Rule, class Codec, class Format, int kPack, int kWhole>
int64_t step_range(const CpuCall& call, const TensorEntry& entry, int64_t begin, int64_t end) {
  const int64_t nonfinite = BlockStepper<Rule, Codec, Format, kPack, kWhole>(call, entry).step(begin, end);
  return call.phase == Phase::kStep ? nonfinite : 0;
}

// The usual cases know their formats and block size when compiled, and go by packs of SHARDOPT_PACK vectors; with packs
// of one there are no such cases. Rows shorter than a pack are none either: they would be filled up.
template <class Rule, class Codec, WeightFormat kWeight, DType kGradient>
CpuKernel usual_kernel(const TensorEntry& entry) {
  const bool is_it =
      entry.weight_format == static_cast<int32_t>(kWeight) && entry.gradient_dtype == static_cast<int32_t>(kGradient);
  constexpr int kWhole = Codec::Signed::kScales > 0 ? 128 : 0;
  return is_it ? step_range<Rule, Codec, FixedFormat<kWeight, kGradient>, SHARDOPT_PACK, kWhole> : nullptr;
}

template <class Rule, class Codec>
int64_t step_blocks(const CpuCall& call, const TensorEntry& entry, int64_t begin, int64_t end) {
  if (call.phase != Phase::kStep && !entry.cut) return 0;
  CpuKernel kernel = nullptr;
  if constexpr (Rule::Kept::kCount > 0 && SHARDOPT_PACK > 1) {
    const bool is_blocked_alike = Codec::Signed::kScales == 0 || entry.block_size == 128;
    if (!entry.cut && is_blocked_alike && entry.cols >= SHARDOPT_PACK * kLanes) {
      kernel = usual_kernel<Rule, Codec, WeightFormat::kFloat32, DType::kFloat32>(entry);
      if (!kernel) kernel = usual_kernel<Rule, Codec, WeightFormat::kBFloat16, DType::kBFloat16>(entry);
      if (!kernel) kernel = usual_kernel<Rule, Codec, WeightFormat::kBFloat16Plus8, DType::kBFloat16>(entry);
    }
  }
  if (!kernel) kernel = step_range<Rule, Codec, AnyFormat, 1, 0>;
  return kernel(call, entry, begin, end);
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
