// The step of a few blocks together on the CPU: one source over the vectors of core/lanes.h.
//
// One pass reads a block, updates it and writes its weights. The new moments wait in the first-level cache until the
// scales are known, and are encoded from there.
#pragma once

#include "step/cpu_call.h"
#include "step/cpu_operands.h"
#include "step/cpu_run.h"

SHARDOPT_BEGIN_NAMESPACE

// Steps blocks of one kernel row, several of one length together: the processor works on one while another waits for
// its maximum. Blocks are stepped by packs of kPack vectors.
template <class Rule, class Codec, int kPack>
class BlockStepper {
  static constexpr int kMoments = Rule::Kept::kCount;
  static constexpr int kUnsigned = Rule::Kept::kUnsigned;
  static constexpr int kSigned = kUnsigned == 0 ? 1 : 0;  // index of the one signed moment that these rules keep
  static constexpr bool kRelative = Codec::kRelative && kUnsigned >= 0;
  static constexpr int kStep = kPack * kLanes;
  static constexpr int kTogether = 16;  // blocks that are stepped together, at most
  using Code = typename Codec::Code;
  using Unsigned = typename Codec::Unsigned;
  using Signed = typename Codec::Signed;
  using Block = shardopt::SHARDOPT_TARGET::Block<Code, kMoments>;
  using Operands = BlockOperands<Code, kMoments>;
  using F = Floats<kPack>;
  using I = Ints<kPack>;
  static constexpr bool kHasSigned = kMoments > (kUnsigned >= 0);
  static constexpr bool kBlockwise = Signed::kScales > 0;
  static constexpr bool kShares = kSharesCodes<Codec>;  // all moments have the codes of the first
  static constexpr int kArrays = kShares ? 1 : kMoments;
  static constexpr bool kRepays = kRepaysOf<Rule> && kRelative;
  // Whether blocks without zeros in the unsigned moment are told apart and take the coder's cheaper way.
  static constexpr bool kTellsZeros = kRelative && Unsigned::kMeasuresSmallest && !kShares && !kRepays;
  static constexpr int kRootScales = Unsigned::kScales + 1;

 public:
  static constexpr int kMost = 1024;  // elements that are stepped together, at most

  // Blocks of one length that wait to be stepped together.
  struct Waiting {
    Block blocks[kTogether];
    int count = 0;
  };

  BlockStepper(const StepCall& call, const KernelRow& kernel_row)
      : call_(call),
        kernel_row_(kernel_row),
        propagates_(call.groups[kernel_row.group].nonfinite == static_cast<int32_t>(NonFinite::kPropagate)),
        rule_(rule_of<Rule>(call.groups[kernel_row.group].hyper, *reinterpret_cast<const float*>(kernel_row.step))),
        gradient_scale_(call.groups[kernel_row.group].gradient_scale),
        table_(call.tables[kernel_row.codec]),
        formats_(kernel_row),
        dither_(*reinterpret_cast<const float*>(kernel_row.step)),
        lane_bits_(as_unsigned(lane_index<kPack>()) * dither_.slope),
        signed_table_(table_),
        unsigned_table_(table_) {}

  // Whether no more blocks of n elements fit.
  SHARDOPT_HD static bool is_full(const Waiting& waiting, int n) {
    return waiting.count == kTogether || (waiting.count + 1) * whole_packs(n) > kMost;
  }

  // Steps the blocks that wait. Out of line: inlined into a larger function, the loops compile to slower code.
  __attribute__((noinline, noclone)) int64_t step(Waiting& waiting) {
    const int count = waiting.count;
    waiting.count = 0;
    if (count == 0) return 0;
    const int n = whole_packs(waiting.blocks[0].n);
    bool has_zero = !kTellsZeros || n != waiting.blocks[0].n;
    for (int b = 0; b < count && !has_zero; ++b) has_zero = has_zero_code(waiting.blocks[b], n);
    int64_t skipped = 0;
    if (has_zero) {
      skipped = update_all<true>(waiting.blocks, count, n);
    } else if constexpr (kTellsZeros) {
      skipped = update_all<false>(waiting.blocks, count, n);
    }
    if constexpr (kBlockwise) encode(n);
    for (int b = 0; b < stepped_; ++b) copies_.give_back(*blocks_[b], formats_, operands_[b]);
    return skipped;
  }

 private:
  static constexpr int whole_packs(int n) { return (n + kStep - 1) / kStep * kStep; }

  template <class Coder>
  SHARDOPT_HD float* scales(int moment, const Block& block) const {
    return reinterpret_cast<float*>(kernel_row_.scales[moment]) + Coder::kScales * block.scale_index;
  }

  // A block's k-th new moment, or its root, or a signed one in units of the root.
  SHARDOPT_HD F* kept(int b, int k, int n) { return kept_[k] + b * n / kStep; }

  // Whether one of n numbers times `factor` is so large that updates may overflow, infinite or NaN.
  SHARDOPT_HD static bool any_large(const float* from, float factor, int n) {
    Ints<1> largest{};
    for (int64_t i = 0; i < n; i += kStep) {
      const auto b = magnitude_bits(load_lanes<kPack>(from + i) * factor);
      for (int j = 0; j < kPack; ++j) largest.x[0] = native::max_int(largest.x[0], b.x[j]);
    }
    return any(largest >= kLargeBits);
  }

  SHARDOPT_HD bool has_large(const Operands& operands, int n) const {
    static_assert(!kHasGain<Rule>, "look at the gradient times the gain");
    if (propagates_) return false;
    if (any_large(operands.gradient, gradient_scale_, n)) return true;
    if constexpr (kHasCoupledDecay<Rule>) {
      const float gain = gains_of(rule_).param;
      return gain != 0.0f && any_large(operands.weight, gain, n);
    }
    return false;
  }

  SHARDOPT_HD bool has_zero_code(const Block& block, int n) const {
    if constexpr (kTellsZeros) return any_zero(block.codes[kUnsigned], n);
    return false;
  }

  SHARDOPT_HD I random_at(const Block& block, int64_t i) const {
    return as_signed(lane_bits_ + (block.dither + static_cast<uint32_t>(i) * dither_.slope));
  }

  // Updates blocks, each right after its gradients are checked, in the order in which memory delivers them. Blocks with
  // large numbers, whose lost updates must be skipped, are stepped as runs instead; returns how many elements were
  // skipped. Out of line for the reason given at `step`.
  template <bool kZeros>
  __attribute__((noinline)) int64_t update_all(const Block* blocks, int count, int n) {
    int64_t skipped = 0;
    stepped_ = 0;
#pragma GCC unroll 1
    for (int b = 0; b < count; ++b) {
      Operands& operands = operands_[stepped_];
      copies_.template take<kStep>(operands, blocks[b], formats_, stepped_ * n, n, kZeroCode);
      if (has_large(operands, n)) {
        skipped += step_runs(call_, kernel_row_, blocks[b].index, blocks[b].index + 1);
        continue;
      }
      blocks_[stepped_] = &blocks[b];
      update<kZeros>(blocks[b], operands, n, stepped_++);
    }
    return skipped;
  }

  // Reads the block, applies the rule and writes the weights. Keeps the new moments and, if the codec has no blocks,
  // encodes them. kZeros: unsigned codes may be zero.
  template <bool kZeros>
  SHARDOPT_HD void update(const Block& block, const Operands& operands, int n, int b) {
    const Rule rule = rule_;
    const Unsigned unsigned_coder(kUnsigned >= 0 ? scales<Unsigned>(kUnsigned, block) : kNoScales, table_);
    const Signed signed_coder(kHasSigned ? scales<Signed>(kSigned, block) : kNoScales, table_);
    LaneExtremes extremes[kMoments + 1];
    for (int k = 0; k < kMoments; ++k) extremes[k] = LaneExtremes::none();
    native::UnsignedInts smallest_root = native::UnsignedInts{} - 1;
    F* to[kMoments + 1];
    Code* from[kMoments + 1];
    for (int k = 0; k < kMoments; ++k) {
      to[k] = kept(b, k, n);
      from[k] = operands.codes[k];
    }
    float* const weights = operands.weight;
    const float* const gradients = operands.gradient;
    const float gradient_scale = gradient_scale_;
    for (int64_t i = 0, pack = 0; i < n; i += kStep, ++pack) {
      F moment[kMoments + 1], root{};
      if constexpr (kBlockwise) {
        fetch_ahead<kStep>(weights + i);
        fetch_ahead<kStep>(gradients + i);
      }
      for (int k = 0; k < kMoments; ++k) {
        const Code* const codes = from[k] + i;
        if constexpr (kBlockwise) fetch_ahead<kStep>(codes);
        if constexpr (!kBlockwise) {
          moment[k] = signed_coder.decode(load_lanes<kPack>(codes));
        } else if (k == kUnsigned) {
          if constexpr (!kZeros) {
            moment[k] = unsigned_coder.decode_above_zero(load_lanes<kPack>(codes));
          } else {
            moment[k] = unsigned_table_.decode(unsigned_coder, codes);
          }
        } else {
          moment[k] = signed_table_.decode(signed_coder, codes);
        }
      }
      if constexpr (kUnsigned >= 0) {
        root = moment[kUnsigned];
        if (kRelative) moment[kSigned] = moment[kSigned] * root;
        if (Codec::kRoot) moment[kUnsigned] = root * root;
      }
      F weight = load_lanes<kPack>(weights + i);
      rule.update(weight, load_lanes<kPack>(gradients + i) * gradient_scale, moment, &root);
      store_lanes(weights + i, weight);
      for (int k = 0; k < kMoments; ++k) {
        const F x = Codec::kRoot && k == kUnsigned ? root : moment[k];
        if constexpr (!kBlockwise) {
          const I random = random_at(block, i);
          const auto code = k == kUnsigned ? unsigned_coder.encode(x, random) : signed_coder.encode(x, random);
          store_lanes(from[k] + i, code);
        } else {
          to[k][pack] = x;
          if (k == kUnsigned) {
            extremes[k].template add_unsigned<Unsigned::kMeasuresSmallest && !kTellsZeros>(x);
            if constexpr (kTellsZeros) {
              const auto x_bits = as_unsigned(bits(x));
              for (int j = 0; j < kPack; ++j) smallest_root = native::min_int(smallest_root, x_bits.x[j]);
            }
          } else if (!kRelative) {
            extremes[k].add_signed(x);
          }
        }
      }
    }
    for (int k = 0; k < kMoments; ++k) extremes_[b][k] = extremes[k];
    if (kTellsZeros) smallest_root_[b] = smallest_root;
  }

  // Measures the roots of a block; returns whether the coder's cheaper way suffices for them.
  SHARDOPT_HD bool measure_roots(int b, int n, float* scales) {
    LaneExtremes extremes = extremes_[b][kUnsigned];
    bool usual = false;
    if constexpr (kTellsZeros) {
      extremes.low = smallest_root_[b] - 1;
      usual = native::smallest(smallest_root_[b]) > 0;
      if (!usual) {
        extremes = LaneExtremes::none();
        for (int i = 0; i < n / kStep; ++i) extremes.template add_unsigned<true>(kept(b, kUnsigned, n)[i]);
      }
    }
    const Extremes of_block = extremes.over_lanes();
    Unsigned::measure(of_block, scales);
    if constexpr (kTellsZeros) return usual && of_block.high < kInfinityBits && Unsigned::is_even(of_block);
    return false;
  }

  // Encodes the roots of blocks and turns their signed moments into units of the decoded roots. If the rule repays, the
  // decoded roots replace the roots. kUsual: the coder's cheaper way suffices.
  template <bool kUsual>
  SHARDOPT_HD void encode_roots(int n, const float (*scales)[kRootScales]) {
#pragma GCC unroll 1
    for (int b = 0; b < stepped_; ++b) {
      const Unsigned coder(scales[b], table_);
      const Block& block = *blocks_[b];
      Code* const codes = operands_[b].codes[kUnsigned];
      F *const roots = kept(b, kUnsigned, n), *const moments = kept(b, kSigned, n);
      LaneExtremes extremes = LaneExtremes::none();
      for (int64_t i = 0, pack = 0; i < n; i += kStep, ++pack) {
        const F x = roots[pack];
        F unit, moment = moments[pack];
        if constexpr (kUsual) {
          store_lanes(codes + i, coder.encode_above_zero(x, unit, random_at(block, i)));
          moment = moment * reciprocal(unit);
        } else {
          store_lanes(codes + i, coder.encode(x, unit, random_at(block, i)));
          moment = select(bits(x) == 0, F{}, moment * reciprocal(unit));
        }
        moments[pack] = moment;
        if constexpr (kRepays) roots[pack] = unit;
        extremes.add_signed(moment);
      }
      extremes_[b][kSigned] = extremes;
    }
  }

  SHARDOPT_HD void encode(int n) {
    float unsigned_scale[kTogether][kRootScales], signed_scale[kTogether][Signed::kScales + 1];
    bool usual = true;
#pragma GCC unroll 1
    for (int b = 0; b < stepped_; ++b) {
      if constexpr (kUnsigned >= 0) usual = measure_roots(b, n, unsigned_scale[b]) && usual;
      if constexpr (kHasSigned && !kRelative) Signed::measure(extremes_[b][kSigned].over_lanes(), signed_scale[b]);
    }
    if constexpr (kUnsigned >= 0) {
      if constexpr (kRelative) {
        if constexpr (kTellsZeros) {
          if (usual) encode_roots<true>(n, unsigned_scale);
        }
        if (!usual) encode_roots<false>(n, unsigned_scale);
      } else {
#pragma GCC unroll 1
        for (int b = 0; b < stepped_; ++b) {
          const Unsigned coder(unsigned_scale[b], table_);
          const Block& block = *blocks_[b];
          Code* const codes = operands_[b].codes[kUnsigned];
          const F* const roots = kept(b, kUnsigned, n);
          for (int64_t i = 0, pack = 0; i < n; i += kStep, ++pack) {
            store_lanes(codes + i, coder.encode(roots[pack], random_at(block, i)));
          }
        }
      }
#pragma GCC unroll 1
      for (int b = 0; b < stepped_; ++b) store_scales<Unsigned>(kUnsigned, *blocks_[b], unsigned_scale[b]);
    }
    if constexpr (kHasSigned) {
      if constexpr (kRelative) {
#pragma GCC unroll 1
        for (int b = 0; b < stepped_; ++b) Signed::measure(extremes_[b][kSigned].over_lanes(), signed_scale[b]);
      }
#pragma GCC unroll 1
      for (int b = 0; b < stepped_; ++b) {
        const Signed coder(signed_scale[b], table_);
        const Block& block = *blocks_[b];
        Code* const to = operands_[b].codes[kSigned];
        float* const weights = operands_[b].weight;
        const F *const moments = kept(b, kSigned, n), *const units = kRepays ? kept(b, kUnsigned, n) : nullptr;
        for (int64_t i = 0, pack = 0; i < n; i += kStep, ++pack) {
          const F x = moments[pack];
          I code = coder.encode(x, random_at(block, i));
          if constexpr (kShares) code = code + load_lanes<kPack>(to + i);
          store_lanes(to + i, code);
          if constexpr (kRepays) {
            const F unit = units[pack], error = (x - signed_table_.decode(coder, code)) * unit;
            store_lanes(weights + i, rule_.repaid(load_lanes<kPack>(weights + i), error, unit));
          }
        }
        store_scales<Signed>(kSigned, block, signed_scale[b]);
      }
    }
  }

  template <class Coder>
  SHARDOPT_HD void store_scales(int moment, const Block& block, const float* scale) const {
    for (int i = 0; i < Coder::kScales; ++i) scales<Coder>(moment, block)[i] = scale[i];
  }

  // The codes of zero of the moments: equal if moments share a code.
  static constexpr Code zero_code(int k) {
    return k == kUnsigned || !kBlockwise ? Code{} : static_cast<Code>(Signed::kZero);
  }
  static constexpr Code kZeroCode[2] = {zero_code(0), zero_code(1)};
  // Scales for the coder of a moment that the rule does not keep, or of a codec without blocks.
  static constexpr float kNoScales[2] = {};

  const StepCall& call_;
  const KernelRow& kernel_row_;
  const bool propagates_;
  const Rule rule_;
  const float gradient_scale_;
  const float* const table_;
  const Formats formats_;
  const Dither dither_;
  const UnsignedInts<kPack> lane_bits_;  // of the first pack of a block, less those of its first element
  const FastTable<Signed, kPack> signed_table_;
  const FastTable<Unsigned, kPack> unsigned_table_;

  // The blocks that are being stepped: those of a call of `step` that have no large numbers.
  int stepped_ = 0;
  const Block* blocks_[kTogether];
  Operands operands_[kTogether];
  LaneExtremes extremes_[kTogether][kMoments + 1];
  native::UnsignedInts smallest_root_[kTogether];  // lane by lane, as bits; if kTellsZeros
  F kept_[kMoments][kMost / kStep];                // of all blocks: see `kept`
  BlockCopies<Code, kMoments, kArrays, kMost> copies_;
};

SHARDOPT_END_NAMESPACE
