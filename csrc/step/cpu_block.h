// The step of one block on the CPU, or of several short ones together: one source over the vectors of core/lanes.h.
//
// One pass reads a block, updates it and writes its weights. The new moments wait in the first-level cache until the
// scales are known, and are encoded from there.
#pragma once

#include "step/cpu_call.h"
#include "step/cpu_passes.h"
#include "step/cpu_place.h"

SHARDOPT_BEGIN_NAMESPACE

// Steps blocks of one kernel row, several of one length together: the processor works on one while another waits for
// its maximum. kMost: elements of the longest block, whole packs. kExact: every block has kMost elements.
template <class Rule, class Codec, class Format, int kPack, int kMost, int kTogether, bool kExact>
class BlockStepper {
  static constexpr int kMoments = Rule::Kept::kCount;
  static constexpr int kUnsigned = Rule::Kept::kUnsigned;
  static constexpr int kSigned = kUnsigned == 0 ? 1 : 0;  // index of the one signed moment that these rules keep
  static constexpr bool kRelative = Codec::kRelative && kUnsigned >= 0;
  static constexpr int kStep = kPack * kLanes;
  static_assert(kMost % kStep == 0, "the longest block is a number of packs");
  static constexpr int kCapacity = kMost / kStep;
  using Code = typename Codec::Code;
  using Unsigned = typename Codec::Unsigned;
  using Signed = typename Codec::Signed;
  using Block = shardopt::SHARDOPT_TARGET::Block<Code, kMoments>;
  using F = Floats<kPack>;
  using I = Ints<kPack>;
  static constexpr bool kHasSigned = kMoments > (kUnsigned >= 0);
  static constexpr bool kBlockwise = Signed::kScales > 0;
  static constexpr bool kShares = kSharesCodes<Codec>;  // all moments have the codes of the first
  static constexpr int kArrays = kShares ? 1 : kMoments;
  static constexpr bool kRepays = kRepaysOf<Rule> && kRelative;
  static constexpr int kWeight = kMoments;  // index in Kept::x, after the moments
  // Whether blocks without zeros in the unsigned moment are told apart and take the coder's cheaper way. Only blocks of
  // kMost elements are: shorter ones may be copies, which zeros fill up.
  static constexpr bool kTellsZeros = kExact && kRelative && Unsigned::kMeasuresSmallest && !kShares && !kRepays;
  static constexpr int kRootScales = Unsigned::kScales + 1;

  // Extremes and moments of a block, kept between the passes.
  struct Kept {
    LaneExtremes extremes[kMoments + 1];
    native::UnsignedInts smallest_root;  // lane by lane, as bits; if kTellsZeros
    // The moments, or an unsigned moment's root; weights, if the rule repays.
    F x[kMoments + 1][kCapacity];
  };

 public:
  BlockStepper(const StepCall& call, const KernelRow& kernel_row)
      : kernel_row_(kernel_row),
        propagates_(call.groups[kernel_row.group].nonfinite == static_cast<int32_t>(NonFinite::kPropagate)),
        rule_(rule_of<Rule>(call.groups[kernel_row.group].hyper, *reinterpret_cast<const float*>(kernel_row.step))),
        gradient_scale_(call.groups[kernel_row.group].gradient_scale),
        table_(call.tables[kernel_row.codec]),
        format_(kernel_row),
        dither_(*reinterpret_cast<const float*>(kernel_row.step)),
        lane_bits_(as_unsigned(lane_index<kPack>()) * dither_.slope),
        signed_table_(table_),
        unsigned_table_(table_) {}

  // Takes a block, as long as the blocks that wait, and steps the blocks once kTogether wait. Returns how many elements
  // were skipped.
  SHARDOPT_HD int64_t add(const Block& block) {
    // Fetched here and not in the step, where the blocks beside this one do not wait for memory.
    if constexpr (!kExact && kBlockwise) fetch_ahead(block, block.n);
    waiting_[count_++] = block;
    return count_ == kTogether ? step_waiting() : 0;
  }

  // Steps the blocks that wait.
  SHARDOPT_HD int64_t step_waiting() {
    const int count = count_;
    count_ = 0;
    if (count == 0) return 0;
    if constexpr (kExact || kMasksMemory) {
      return step(waiting_, count);
    } else {
      return waiting_[0].n % kStep == 0 ? step(waiting_, count) : step_in_copies(count);
    }
  }

 private:
  // Out of line: the copies are large.
  __attribute__((noinline)) int64_t step_in_copies(int count) {
    BlockCopy<Code, kMoments, kArrays, kMost> copies[kTogether];
    Block blocks[kTogether];
    const int padded = (waiting_[0].n + kStep - 1) / kStep * kStep;
    const Code zero_codes[2] = {kZeroCode[kUnsigned != 0], kZeroCode[kUnsigned != 1]};
    for (int b = 0; b < count; ++b)
      blocks[b] = copies[b].template take<kStep>(waiting_[b], padded, format_, zero_codes);
    const int64_t nonfinite = step(blocks, count);
    for (int b = 0; b < count; ++b) copies[b].give_back(waiting_[b], format_);
    return nonfinite;
  }

  // Out of line: inlined into a larger function, this loop compiles to slower code.
  __attribute__((noinline, noclone)) int64_t step(const Block* blocks, int count) {
    const int n = kExact ? kMost : blocks[0].n;
    Kept kept[kTogether];
    int64_t nonfinite = 0;
    bool has_zero = !kTellsZeros;
    for (int b = 0; b < count && kTellsZeros; ++b) has_zero |= has_zero_code(blocks[b], n);
    if (has_zero) {
      nonfinite = update_all<true>(blocks, count, n, kept);
    } else if constexpr (kTellsZeros) {
      nonfinite = update_all<false>(blocks, count, n, kept);
    }
    if constexpr (kBlockwise) encode(blocks, count, n, kept);
    return nonfinite;
  }

  // Calls take(i, lanes) for each pack of n elements.
  template <class Take>
  SHARDOPT_HD static void each_pack(int n, Take take) {
    int i = 0;
    for (; i + kStep <= n; i += kStep) take(i, AllLanes{});
    if constexpr (!kExact && kMasksMemory) {
      if (i < n) take(i, FirstLanes{n - i});
    }
  }

  template <class Coder>
  SHARDOPT_HD float* scales(int moment, const Block& block) const {
    return reinterpret_cast<float*>(kernel_row_.scales[moment]) + Coder::kScales * block.scale_index;
  }

  // Whether updates may overflow. The factor 2 is for master weights: this reads the rounded parameter, and its master
  // weight is at most twice as large.
  SHARDOPT_HD bool has_large(const Block& block, int n) const {
    static_assert(!kHasGain<Rule>, "look at the gradient times the gain");
    if (propagates_) return false;
    if (any_at_least<kPack>(block.gradient, format_.gradient(), n, gradient_scale_, kLargeBits)) return true;
    if constexpr (kHasCoupledDecay<Rule>) {
      const float gain = 2.0f * gains_of(rule_).param;
      return gain != 0.0f && any_at_least<kPack>(block.weights.words, dtype_of(format_.weight()), n, gain, kLargeBits);
    }
    return false;
  }

  SHARDOPT_HD bool has_zero_code(const Block& block, int n) const {
    if constexpr (kTellsZeros) return any_zero(block.codes[kUnsigned], n);
    return false;
  }

  SHARDOPT_HD I random_at(const Block& block, int i) const {
    return as_signed(lane_bits_ + (block.dither + static_cast<uint32_t>(i) * dither_.slope));
  }

  template <class Lanes>
  SHARDOPT_HD F gradient_at(const Block& block, int i, Lanes lanes) const {
    return load_floats<kPack>(block.gradient, format_.gradient(), i, lanes) * gradient_scale_;
  }

  // Prefetches the operands of a later block of the row, or of the next row: processors prefetch neither past a page
  // nor past a short block, which is stepped later.
  SHARDOPT_HD void fetch_ahead(const Block& block, int n) const {
    const auto count = static_cast<uint64_t>(n);
    const uint64_t weight_bytes = bytes_of(format_.weight()), low_bytes = low_bytes_of(format_.weight());
    const uint64_t gradient_bytes = bytes_of(format_.gradient());
    fetch_lines(block.weights.words + kFetchedAhead * weight_bytes, count * weight_bytes);
    if (low_bytes) fetch_lines(block.weights.low_bits + kFetchedAhead * low_bytes, count * low_bytes);
    fetch_lines(block.gradient + kFetchedAhead * gradient_bytes, count * gradient_bytes);
    for (int k = 0; k < kArrays; ++k) fetch_lines(block.codes[k] + kFetchedAhead, count * sizeof(Code));
  }

  // Updates blocks, each right after its gradients are checked, in the order in which memory delivers them; returns the
  // number of skipped elements. Out of line for the reason given at `step`.
  template <bool kZeros>
  __attribute__((noinline)) int64_t update_all(const Block* blocks, int count, int n, Kept* kept) const {
    int64_t nonfinite = 0;
#pragma GCC unroll 1
    for (int b = 0; b < count; ++b) {
      const Block block = blocks[b].copy();  // a copy, so that the compiler knows that no store changes it
      if constexpr (kExact && kBlockwise) fetch_ahead(block, kMost);
      if (has_large(block, n)) {
        nonfinite += update_skipping(blocks[b], n, kept[b]);  // not `block`, which stays in registers
      } else {
        update<false, kZeros>(block, n, kept[b]);
      }
    }
    return nonfinite;
  }

  __attribute__((noinline)) int64_t update_skipping(const Block& block, int n, Kept& kept) const {
    return update<true, true>(block, n, kept);
  }

  // Reads the block, applies the rule and writes the weights, unless the rule repays. Keeps the new moments and, if the
  // codec has no blocks, encodes them. kSkips: elements whose update is lost keep weight and moments; returns their
  // number. kZeros: unsigned codes may be zero.
  template <bool kSkips, bool kZeros>
  SHARDOPT_HD int64_t update(const Block& block, int n, Kept& kept) const {
    const Rule rule = rule_;
    const Unsigned unsigned_coder(kUnsigned >= 0 ? scales<Unsigned>(kUnsigned, block) : kNoScales, table_);
    const Signed signed_coder(kHasSigned ? scales<Signed>(kSigned, block) : kNoScales, table_);
    LaneExtremes extremes[kMoments + 1];
    for (int k = 0; k < kMoments; ++k) extremes[k] = LaneExtremes::none();
    native::UnsignedInts smallest_root = native::UnsignedInts{} - 1;
    int64_t skipped = 0;
    each_pack(n, [&](int i, auto lanes) __attribute__((always_inline)) {
      F moment[kMoments + 1], root{};
      for (int k = 0; k < kMoments; ++k) {
        const Code* const codes = block.codes[k] + i;
        if constexpr (!kBlockwise) {
          moment[k] = signed_coder.decode(load_lanes<kPack>(codes, lanes));
        } else if (k == kUnsigned) {
          if constexpr (!kZeros) {
            moment[k] = unsigned_coder.decode_above_zero(load_lanes<kPack>(codes));
          } else {
            moment[k] = unsigned_table_.decode(unsigned_coder, codes, lanes, kZeroCode[false]);
          }
        } else {
          moment[k] = signed_table_.decode(signed_coder, codes, lanes, kZeroCode[true]);
        }
      }
      if constexpr (kUnsigned >= 0) {
        root = moment[kUnsigned];
        if (kRelative) moment[kSigned] = moment[kSigned] * root;
        if (Codec::kRoot) moment[kUnsigned] = root * root;
      }
      F weight = block.weights.template load<kPack>(format_.weight(), i, lanes);
      const F gradient = gradient_at(block, i, lanes);
      if constexpr (kSkips) {
        const F old_weight = weight, old_root = root;
        F old_moment[kMoments + 1];
        for (int k = 0; k < kMoments; ++k) old_moment[k] = moment[k];
        rule.update(weight, gradient, moment, &root);
        const auto lost = is_lost(rule, gradient, old_weight, weight, moment);
        skipped += count(lost);
        weight = select(lost, old_weight, weight);
        root = select(lost, old_root, root);
        for (int k = 0; k < kMoments; ++k) moment[k] = select(lost, old_moment[k], moment[k]);
      } else {
        rule.update(weight, gradient, moment, &root);
      }
      if constexpr (kRepays) {
        kept.x[kWeight][i / kStep] = weight;
      } else {
        block.weights.store(weight, format_.weight(), i, lanes);
      }
      for (int k = 0; k < kMoments; ++k) {
        const F x = Codec::kRoot && k == kUnsigned ? root : moment[k];
        if constexpr (!kBlockwise) {
          const I random = random_at(block, i);
          const auto code = k == kUnsigned ? unsigned_coder.encode(x, random) : signed_coder.encode(x, random);
          store_lanes(block.codes[k] + i, code, lanes);
        } else {
          kept.x[k][i / kStep] = x;
          if (k == kUnsigned) {
            extremes[k].template add_unsigned<Unsigned::kMeasuresSmallest && !kTellsZeros>(x);
            if constexpr (kTellsZeros) {
              const auto b = as_unsigned(bits(x));
              for (int j = 0; j < kPack; ++j) smallest_root = native::min_int(smallest_root, b.x[j]);
            }
          } else if (!kRelative) {
            extremes[k].add_signed(x);
          }
        }
      }
    });
    for (int k = 0; k < kMoments; ++k) kept.extremes[k] = extremes[k];
    if (kTellsZeros) kept.smallest_root = smallest_root;
    return skipped;
  }

  // Measures the roots of a block; returns whether the coder's cheaper way suffices for them.
  SHARDOPT_HD bool measure_roots(const Kept& kept, int n, float* scales) const {
    LaneExtremes extremes = kept.extremes[kUnsigned];
    bool usual = false;
    if constexpr (kTellsZeros) {
      extremes.low = kept.smallest_root - 1;
      usual = native::smallest(kept.smallest_root) > 0;
      if (!usual) {
        extremes = LaneExtremes::none();
        for (int i = 0; i < n; i += kStep) extremes.template add_unsigned<true>(kept.x[kUnsigned][i / kStep]);
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
  SHARDOPT_HD void encode_roots(const Block* blocks, int count, int n, const float (*scales)[kRootScales],
                                Kept* kept) const {
#pragma GCC unroll 1
    for (int b = 0; b < count; ++b) {
      const Unsigned coder(scales[b], table_);
      const Block block = blocks[b].copy();
      LaneExtremes extremes = LaneExtremes::none();
      each_pack(n, [&](int i, auto lanes) __attribute__((always_inline)) {
        const F x = kept[b].x[kUnsigned][i / kStep];
        F unit, &moment = kept[b].x[kSigned][i / kStep];
        const I random = random_at(block, i);
        if constexpr (kUsual) {
          store_lanes(block.codes[kUnsigned] + i, coder.encode_above_zero(x, unit, random), lanes);
          moment = moment * reciprocal(unit);
        } else {
          store_lanes(block.codes[kUnsigned] + i, coder.encode(x, unit, random), lanes);
          moment = select(bits(x) == 0, F{}, moment * reciprocal(unit));
        }
        if constexpr (kRepays) kept[b].x[kUnsigned][i / kStep] = unit;
        extremes.add_signed(moment);
      });
      kept[b].extremes[kSigned] = extremes;
    }
  }

  SHARDOPT_HD void encode(const Block* blocks, int count, int n, Kept* kept) const {
    float unsigned_scale[kTogether][kRootScales], signed_scale[kTogether][Signed::kScales + 1];
    bool usual = true;
#pragma GCC unroll 1
    for (int b = 0; b < count; ++b) {
      if constexpr (kUnsigned >= 0) usual = measure_roots(kept[b], n, unsigned_scale[b]) && usual;
      if constexpr (kHasSigned && !kRelative) {
        Signed::measure(kept[b].extremes[kSigned].over_lanes(), signed_scale[b]);
      }
    }
    if constexpr (kUnsigned >= 0) {
      if constexpr (kRelative) {
        if constexpr (kTellsZeros) {
          if (usual) encode_roots<true>(blocks, count, n, unsigned_scale, kept);
        }
        if (!usual) encode_roots<false>(blocks, count, n, unsigned_scale, kept);
      } else {
#pragma GCC unroll 1
        for (int b = 0; b < count; ++b) {
          const Unsigned coder(unsigned_scale[b], table_);
          const Block block = blocks[b].copy();
          each_pack(n, [&](int i, auto lanes) __attribute__((always_inline)) {
            const F x = kept[b].x[kUnsigned][i / kStep];
            store_lanes(block.codes[kUnsigned] + i, coder.encode(x, random_at(block, i)), lanes);
          });
        }
      }
#pragma GCC unroll 1
      for (int b = 0; b < count; ++b) {
        store_scales<Unsigned>(kUnsigned, blocks[b], unsigned_scale[b]);
      }
    }
    if constexpr (kHasSigned) {
      if constexpr (kRelative) {
#pragma GCC unroll 1
        for (int b = 0; b < count; ++b) {
          Signed::measure(kept[b].extremes[kSigned].over_lanes(), signed_scale[b]);
        }
      }
#pragma GCC unroll 1
      for (int b = 0; b < count; ++b) {
        const Signed coder(signed_scale[b], table_);
        const Block block = blocks[b].copy();
        each_pack(n, [&](int i, auto lanes) __attribute__((always_inline)) {
          const F x = kept[b].x[kSigned][i / kStep];
          I code = coder.encode(x, random_at(block, i));
          Code* const codes = block.codes[kSigned] + i;
          if constexpr (kShares) code = code + load_lanes<kPack>(codes, lanes);
          store_lanes(codes, code, lanes);
          if constexpr (kRepays) {
            const F unit = kept[b].x[kUnsigned][i / kStep], error = (x - signed_table_.decode(coder, code)) * unit;
            block.weights.store(rule_.repaid(kept[b].x[kWeight][i / kStep], error, unit), format_.weight(), i, lanes);
          }
        });
        store_scales<Signed>(kSigned, block, signed_scale[b]);
      }
    }
  }

  template <class Coder>
  SHARDOPT_HD void store_scales(int moment, const Block& block, const float* scale) const {
    for (int i = 0; i < Coder::kScales; ++i) scales<Coder>(moment, block)[i] = scale[i];
  }

  // The codes of a zero unsigned moment and of a zero signed moment: equal if moments share a code.
  static constexpr Code kZeroCode[2] = {Code{}, static_cast<Code>(kBlockwise ? Signed::kZero : 0)};
  // Scales for the coder of a moment that the rule does not keep, or of a codec without blocks.
  static constexpr float kNoScales[2] = {};

  const KernelRow& kernel_row_;
  const bool propagates_;
  const Rule rule_;
  const float gradient_scale_;
  const float* const table_;
  const Format format_;
  const Dither dither_;
  const UnsignedInts<kPack> lane_bits_;  // of the first pack of a block, less those of its first element
  const FastTable<Signed, kPack> signed_table_;
  const FastTable<Unsigned, kPack> unsigned_table_;
  Block waiting_[kTogether];
  int count_ = 0;
};

SHARDOPT_END_NAMESPACE
