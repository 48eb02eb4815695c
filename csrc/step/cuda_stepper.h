// The step of a task on CUDA: a block per group of lanes, eight consecutive elements per lane, the same rule and codec
// headers as on the CPU.
//
// A block of up to kWarp * kLane elements is read once and stays in registers from the update to the encoding. A larger
// one is taken in chunks and computed anew in each pass; nothing of it is stored before the last one. So are cut
// blocks, whose passes are launches of their own.
#pragma once

#include "step/cuda.h"
#include "step/cuda_lane.h"
#include "step/instances.h"

SHARDOPT_BEGIN_NAMESPACE

constexpr int kWarp = 32;
constexpr int kChunk = kWarp * kLane;

// The value of the lane whose number differs in these bits. All lanes of the warp take part.
SHARDOPT_DEVICE int32_t exchange(int32_t x, int lane_bits) { return __shfl_xor_sync(0xffffffffu, x, lane_bits); }

// Rule and scalars of an entry's tasks, from its group and its step count.
template <class Rule>
struct Prepared {
  Rule rule;
  float gradient_scale;
  float step;
  bool skips;
};

// Passes over a block, one after the other: the extremes of all moments but relative ones, those of relative ones,
// codes.
enum Pass { kMeasure = 0, kRelate = 1, kEncode = 2 };

// The scales of a block with these extremes.
template <class Coder>
struct Scales {
  float x[Coder::kScales + 1];

  SHARDOPT_DEVICE explicit Scales(const Extremes& extremes) { Coder::measure(extremes, x); }
};

template <class Rule, class Codec>
class WarpStepper {
  static constexpr int kMoments = Rule::Kept::kCount;
  static constexpr int kUnsigned = Rule::Kept::kUnsigned;
  static constexpr int kSigned = kUnsigned == 0 ? 1 : 0;  // no rule keeps more than one
  static constexpr bool kRelative = Codec::kRelative && kUnsigned >= 0;
  static constexpr bool kBlockwise = Codec::Signed::kScales > 0;
  using Code = typename Codec::Code;
  using Unsigned = typename Codec::Unsigned;
  using Signed = typename Codec::Signed;

 public:
  SHARDOPT_DEVICE WarpStepper(const TensorEntry& entry, const Prepared<Rule>& prepared, const float* table, Phase phase)
      : entry_(entry),
        streams_(entry),
        prepared_(prepared),
        rule_(prepared.rule),
        gradient_scale_(prepared.gradient_scale),
        table_(table),
        phase_(phase) {
    uint64_t codes = 0;
    for (int k = 0; k < kMoments; ++k) {
      codes_[k] = entry.codes[k];
      codes |= codes_[k];
    }
    const uint64_t rest = entry.param | entry.gradient | entry.low_bits;
    aligned_ =
        rest % 16 == 0 && codes % alignof(Vector<Code>) == 0 && (entry.rows == 1 || entry.row_stride % kLane == 0);
  }

  // Returns how many elements this lane has skipped.
  template <bool kOnce>
  SHARDOPT_DEVICE int step(const CudaTask& task) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int block_size = entry_.block_size;
    lanes_ = block_size < kChunk ? block_size / kLane : kWarp;
    lane_ = lane % lanes_;
    const int groups = kWarp / lanes_, group = lane / lanes_;
    const int64_t blocks_per_row = (entry_.cols + block_size - 1) / block_size;
    const int64_t row = (task.first_block + group) / blocks_per_row;
    const int64_t block = task.first_block + group - row * blocks_per_row;
    left_ = entry_.cols - block * block_size;
    element_ = row * entry_.row_stride + block * block_size + lane_ * kLane;
    scale_index_ = row * entry_.scales_row_stride + block;
    for (int i = group; i < task.blocks + group; i += groups) {  // every lane takes every turn, to exchange extremes
      n_ = i >= task.blocks ? 0 : static_cast<int>(left_ < block_size ? left_ : block_size);
      if constexpr (!kBlockwise) {
        step_plain();
      } else {
        step_block<kOnce>();
      }
      left_ -= groups * block_size;
      element_ += groups * block_size;
      scale_index_ += groups;
      while (left_ <= 0) {
        const int64_t blocks = (entry_.cols + block_size - 1) / block_size;
        left_ += blocks * block_size;
        element_ += entry_.row_stride - blocks * block_size;
        scale_index_ += entry_.scales_row_stride - blocks;
      }
    }
    return skipped_;
  }

 private:
  // A codec without blocks.
  SHARDOPT_DEVICE void step_plain() {
    const float no_scales[2] = {};
    for (int begin = 0; begin < entry_.block_size; begin += kChunk) {
      compute(begin, true);
      store_params();
#pragma unroll
      for (int k = 0; k < kMoments; ++k) {
        if (k == kUnsigned) {
          store_codes(k, Unsigned(no_scales, table_));
        } else {
          store_codes(k, Signed(no_scales, table_));
        }
      }
    }
  }

  // kOnce: a whole block of one chunk.
  template <bool kOnce>
  SHARDOPT_DEVICE void step_block() {
    const int first = kOnce || phase_ == Phase::kStep ? kMeasure : phase_ == Phase::kRelative ? kRelate : kEncode;
    const int last = kOnce || !entry_.cut ? kEncode : first;
    const int end = kOnce ? 1 : entry_.block_size;
    Extremes found[kMoments + 1] = {};
#pragma unroll
    for (int k = 0; k < kMoments; ++k) {  // what the owners of a cut block have agreed on
      const bool is_known = first == kEncode || (first == kRelate && k == kUnsigned);
      if (!kOnce && is_known && n_ > 0) found[k] = *shared_extremes(k);
    }
#pragma unroll(kOnce ? 3 : 1)
    for (int pass = first; pass <= last; ++pass) {
      if (pass == kRelate && !kRelative) continue;
      for (int begin = 0; begin < end; begin += kChunk) {
        if (!kOnce || pass == kMeasure) {
          compute(begin, pass == kMeasure);
          if (kOnce || pass == kEncode) store_params();
        }
        if (pass > kMeasure && (!kOnce || pass == (kRelative ? kRelate : kEncode))) {
          encode_unsigned(found, kOnce || pass == kEncode);
        }
#pragma unroll
        for (int k = 0; k < kMoments; ++k) {
          if (pass == kEncode) {
            if (k != kUnsigned) store_codes(k, Signed(Scales<Signed>(found[k]).x, table_));
          } else if (is_measured(k, pass)) {
            widen(found[k], k);
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kMoments; ++k) {
        if (!is_measured(k, pass)) continue;
        agree(found[k], k);
        if (!kOnce && entry_.cut && lane_ == 0 && n_ > 0) *shared_extremes(k) = found[k];
      }
    }
    if (last == kEncode) store_scales(found);
  }

  SHARDOPT_DEVICE static constexpr bool is_measured(int moment, int pass) {
    return pass == (kRelative && moment != kUnsigned ? kRelate : kMeasure);
  }

  // Reads and updates the lane's elements of the chunk that begins there. Missing elements are as if all of theirs were
  // zero: no rule changes such a state, and no extreme shows it.
  SHARDOPT_DEVICE void compute(int begin, bool counts) {
    const int left = n_ - begin - lane_ * kLane;
    span_.element = element_ + begin;
    span_.n = left < 0 ? 0 : left < kLane ? left : kLane;
    span_.in_words = aligned_ && left >= kLane;
    const int32_t largest_gradient = update<false>(counts);
    if (largest_gradient >= kLargeGradientBits && prepared_.skips) update<true>(counts);
  }

  // Nothing is written: this can be done again. kSkips: elements whose update is lost stay as they are. Returns the
  // largest magnitude among the gradients, as bits.
  template <bool kSkips>
  SHARDOPT_DEVICE int32_t update(bool counts) {
    float gradient[kLane], root[kLane] = {}, moment[kMoments + 1][kLane];
    load_weights(param_, streams_, span_);
    load_gradients(gradient, streams_, span_);
    decode(moment, root);
    int32_t largest_gradient = 0;
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      const float g = gradient[i] * gradient_scale_;
      largest_gradient = max_int(largest_gradient, magnitude_bits(g));
      float new_param = param_[i], new_root = root[i], new_moment[kMoments + 1];
#pragma unroll
      for (int k = 0; k < kMoments; ++k) new_moment[k] = moment[k][i];
      rule_.update(new_param, g, new_moment, new_root);
      if (kSkips && is_lost<kMoments>(g, new_param, new_moment)) {
        skipped_ += counts;
        new_param = param_[i];
        new_root = root[i];
#pragma unroll
        for (int k = 0; k < kMoments; ++k) new_moment[k] = moment[k][i];
      }
      param_[i] = new_param;
#pragma unroll
      for (int k = 0; k < kMoments; ++k) kept_[k][i] = Codec::kRoot && k == kUnsigned ? new_root : new_moment[k];
    }
    return largest_gradient;
  }

  // `root`: what stands for the unsigned moment in its codes.
  SHARDOPT_DEVICE void decode(float (&moment)[kMoments + 1][kLane], float (&root)[kLane]) const {
    if constexpr (kUnsigned >= 0) {
      const Vector<Code> codes = load_lane<Code>(codes_[kUnsigned], span_);
      const Unsigned coder(old_scales<Unsigned>(kUnsigned).x, table_);
#pragma unroll
      for (int i = 0; i < kLane; ++i) {
        root[i] = coder.decode(as_number(codes.x[i]));
        moment[kUnsigned][i] = Codec::kRoot ? root[i] * root[i] : root[i];
      }
    }
#pragma unroll
    for (int k = 0; k < kMoments; ++k) {
      if (k == kUnsigned) continue;
      const Vector<Code> codes = load_lane<Code>(codes_[k], span_, static_cast<Code>(Signed::kZero));
      const Signed coder(old_scales<Signed>(k).x, table_);
#pragma unroll
      for (int i = 0; i < kLane; ++i) {
        const float x = coder.decode(as_number(codes.x[i]));
        moment[k][i] = kRelative ? x * root[i] : x;
      }
    }
  }

  // Encodes the unsigned moment, and turns relative ones into units of its root as that will be decoded.
  SHARDOPT_DEVICE void encode_unsigned(const Extremes* found, bool stores) {
    if constexpr (kUnsigned >= 0) {
      const Unsigned coder(Scales<Unsigned>(found[kUnsigned]).x, table_);
      Vector<Code> codes;
#pragma unroll
      for (int i = 0; i < kLane; ++i) {
        const float x = kept_[kUnsigned][i];
        if constexpr (kRelative) {
          float unit;
          codes.x[i] = static_cast<Code>(coder.encode(x, unit));
          const bool is_zero = bits(x) == 0;
          const float in_units = kept_[kSigned][i] * reciprocal(is_zero ? 1.0f : unit);  // that of 0 takes long
          kept_[kSigned][i] = is_zero ? 0.0f : in_units;
        } else {
          codes.x[i] = static_cast<Code>(coder.encode(x));
        }
      }
      if (stores) store_lane(codes_[kUnsigned], codes, span_);
    }
  }

  template <class Coder>
  SHARDOPT_DEVICE void store_codes(int moment, const Coder& coder) const {
    Vector<Code> codes;
#pragma unroll
    for (int i = 0; i < kLane; ++i) codes.x[i] = static_cast<Code>(coder.encode(kept_[moment][i]));
    store_lane(codes_[moment], codes, span_);
  }

  SHARDOPT_DEVICE void store_params() const {
    store_weights(param_, streams_, span_, [this](const float (&x)[kLane]) {
      const int64_t row = (element_ - lane_ * kLane - (entry_.cols - left_)) / entry_.row_stride;
      return bf16_lane_at_random(x, entry_, prepared_.step, row, span_.element - row * entry_.row_stride);
    });
  }

  SHARDOPT_DEVICE void store_scales(const Extremes* found) const {
    __syncwarp();  // all lanes have read the old ones
    if (lane_ > 0 || n_ == 0) return;
#pragma unroll
    for (int k = 0; k < kMoments; ++k) {
      if (k == kUnsigned) {
        const Scales<Unsigned> scales(found[k]);
        for (int i = 0; i < Unsigned::kScales; ++i) scales_of<Unsigned>(k)[i] = scales.x[i];
      } else {
        const Scales<Signed> scales(found[k]);
        for (int i = 0; i < Signed::kScales; ++i) scales_of<Signed>(k)[i] = scales.x[i];
      }
    }
  }

  SHARDOPT_DEVICE void widen(Extremes& e, int moment) const {
    uint32_t smallest = ~0u;  // of the bits above zero, less one
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      const int32_t b = magnitude_bits(kept_[moment][i]);
      e.high = max_int(e.high, b);
      smallest = min(smallest, static_cast<uint32_t>(b) - 1u);
    }
    if (needs_smallest(moment) && smallest != ~0u) {
      e.low = max_int(e.low, kInfinityBits - static_cast<int32_t>(smallest + 1));
    }
  }

  SHARDOPT_DEVICE static constexpr bool needs_smallest(int moment) {
    if constexpr (kUnsigned >= 0 && kBlockwise) return moment == kUnsigned && Unsigned::kMeasuresSmallest;
    return false;
  }

  // The extremes of the whole block, in all of its lanes.
  SHARDOPT_DEVICE void agree(Extremes& e, int moment) const {
#pragma unroll
    for (int lane_bit = 1; lane_bit < kWarp; lane_bit *= 2) {
      if (lane_bit >= lanes_) continue;
      e.high = max_int(e.high, exchange(e.high, lane_bit));
      if (needs_smallest(moment)) e.low = max_int(e.low, exchange(e.low, lane_bit));
    }
  }

  template <class Coder>
  SHARDOPT_DEVICE float* scales_of(int moment) const {
    return reinterpret_cast<float*>(entry_.scales[moment]) + Coder::kScales * scale_index_;
  }

  template <class Coder>
  struct OldScales {
    float x[Coder::kScales + 1];
  };

  template <class Coder>
  SHARDOPT_DEVICE OldScales<Coder> old_scales(int moment) const {
    OldScales<Coder> old = {};
    if (n_ == 0) return old;
#pragma unroll
    for (int i = 0; i < Coder::kScales; ++i) old.x[i] = scales_of<Coder>(moment)[i];
    return old;
  }

  SHARDOPT_DEVICE Extremes* shared_extremes(int moment) const {
    return reinterpret_cast<Extremes*>(entry_.extremes[moment]) + scale_index_;
  }

  const TensorEntry& entry_;
  const Streams streams_;
  const Prepared<Rule>& prepared_;
  const Rule rule_;
  const float gradient_scale_;
  const float* const table_;
  const Phase phase_;
  uint64_t codes_[kMoments + 1];
  bool aligned_;
  int lanes_ = 0, lane_ = 0;  // of the block's group, and which of them this is
  int64_t left_ = 0;          // elements from the block's first one to its row's end
  int64_t element_ = 0;       // the lane's first one in the block's first chunk
  int64_t scale_index_ = 0;   // the block's place in scales and extremes
  int n_ = 0;                 // its elements
  Span span_ = {};            // the lane's elements
  int skipped_ = 0;
  float param_[kLane];
  float kept_[kMoments + 1][kLane];  // the moments, but the unsigned one's root where the codec wants that
};

SHARDOPT_END_NAMESPACE
