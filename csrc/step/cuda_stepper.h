// The step of a task on CUDA: a block per group of lanes, eight consecutive elements per lane. Uses the rule and codec
// headers that the CPU uses.
//
// A block of up to kChunk elements is read once and stays in registers from the update to the encoding. A larger
// block is taken in chunks and computed anew in each pass; only the last pass stores. So are cut blocks, whose passes
// are separate launches.
#pragma once

#include "step/cuda.h"
#include "step/cuda_kept.h"
#include "step/cuda_lane.h"
#include "step/cuda_sums.h"

SHARDOPT_BEGIN_NAMESPACE

constexpr int kChunk = kWarp * kLane;

template <class Rule, class Codec>
class WarpStepper {
  static constexpr int kMoments = Rule::Kept::kCount;
  static constexpr int kUnsigned = Rule::Kept::kUnsigned;
  static constexpr bool kRelative = Codec::kRelative && kUnsigned >= 0;
  static constexpr bool kBlockwise = Codec::Signed::kScales > 0;
  static constexpr bool kRepays = kRepaysOf<Rule> && kRelative;
  struct Nothing {};
  template <int k>
  using Moment = KeptMoment<Rule, Codec, k>;

 public:
  SHARDOPT_DEVICE WarpStepper(const KernelRow& kernel_row, const Prepared<Rule>& prepared, const float* table,
                              Phase phase)
      : kernel_row_(kernel_row),
        streams_(kernel_row),
        prepared_(prepared),
        rule_(prepared.rule),
        gradient_scale_(prepared.gradient_scale),
        table_(table),
        phase_(phase) {
    const uint64_t rest = kernel_row.param | kernel_row.gradient | kernel_row.low_bits;
    aligned_ = rest % 16 == 0 && (kernel_row.rows == 1 || kernel_row.row_stride % kLane == 0);
    each_of<kMoments>([&](auto k) {
      codes_[k()] = kernel_row.codes[k()];
      aligned_ &= codes_[k()] % alignof(Vector<typename Moment<k()>::Code>) == 0;
    });
  }

  // Steps the task's blocks; returns the number of elements that this lane has skipped.
  template <bool kOnce>
  SHARDOPT_DEVICE int step(const CudaTask& task) {
    each_turn(task, [this] {
      if constexpr (!kBlockwise) {
        step_plain();
      } else {
        step_block<kOnce>();
      }
    });
    return skipped_;
  }

  // Adds the task's elements to the sums of their parameter, and changes nothing else.
  SHARDOPT_DEVICE void add_to_sums(const CudaTask& task) {
    WarpSum sums[kSumsOf<Rule>];
    each_turn(task, [&] {
      for (int begin = 0; begin < kernel_row_.block_size; begin += kChunk) {
        float terms[kSumsOf<Rule>][kLane], factors[kSumsOf<Rule>][kLane];
        compute_terms(terms, factors, begin);
        for (int j = 0; j < kSumsOf<Rule>; ++j) {
          if constexpr (kHasProducts<Rule>) {
            sums[j].add_products(terms[j], factors[j]);
          } else {
            sums[j].add_squares(terms[j]);
          }
        }
      }
    });
    for (int j = 0; j < kSumsOf<Rule>; ++j) {
      sums[j].template add_to<kHasTotals<Rule>>(reinterpret_cast<ExactSum*>(kernel_row_.sums) + j);
    }
  }

 private:
  // Moves the lane to each of the task's blocks in turn and calls take().
  template <class Take>
  SHARDOPT_DEVICE void each_turn(const CudaTask& task, Take take) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int block_size = kernel_row_.block_size;
    lanes_ = block_size < kChunk ? block_size / kLane : kWarp;
    lane_ = lane % lanes_;
    const int groups = kWarp / lanes_, group = lane / lanes_;
    const int64_t blocks_per_row = (kernel_row_.cols + block_size - 1) / block_size;
    const int64_t row = (task.first_block + group) / blocks_per_row;
    const int64_t block = task.first_block + group - row * blocks_per_row;
    left_ = kernel_row_.cols - block * block_size;
    element_ = row * kernel_row_.row_stride + block * block_size + lane_ * kLane;
    scale_index_ = row * kernel_row_.scales_row_stride + block;
    global_ = static_cast<uint32_t>(global_element(kernel_row_, row, block * block_size + lane_ * kLane));
    for (int i = group; i < task.blocks + group; i += groups) {  // every lane takes every turn, to exchange extremes
      n_ = i >= task.blocks ? 0 : static_cast<int>(left_ < block_size ? left_ : block_size);
      take();
      left_ -= groups * block_size;
      element_ += groups * block_size;
      global_ += static_cast<uint32_t>(groups * block_size);
      scale_index_ += groups;
      while (left_ <= 0) {
        const int64_t blocks = (kernel_row_.cols + block_size - 1) / block_size;
        left_ += blocks * block_size;
        element_ += kernel_row_.row_stride - blocks * block_size;
        global_ += static_cast<uint32_t>(kernel_row_.global_row_numel - blocks * block_size);
        scale_index_ += kernel_row_.scales_row_stride - blocks;
      }
    }
  }

  // Steps elements whose codec has no blocks.
  SHARDOPT_DEVICE void step_plain() {
    const float no_scales[2] = {};
    for (int begin = 0; begin < kernel_row_.block_size; begin += kChunk) {
      compute(begin, true);
      store_params();
      each_of<kMoments>([&](auto k) { store_codes<k()>(no_scales); });
    }
  }

  // Steps a block. kOnce: the block is whole and has one chunk, so that it is read once; other blocks that are and have
  // tell so at run time.
  template <bool kOnce>
  SHARDOPT_DEVICE void step_block() {
    const bool once = kOnce || (kernel_row_.block_size <= kChunk && !kernel_row_.cut);
    const int first = kOnce || phase_ == Phase::kStep ? kMeasure : phase_ == Phase::kRelative ? kRelate : kEncode;
    const int last = kOnce || !kernel_row_.cut ? kEncode : first;
    const int end = kOnce ? 1 : kernel_row_.block_size;
    Extremes found[kMoments + 1] = {};
    each_of<kMoments>([&](auto k) {  // extremes that the owners of a cut block have agreed on
      if (!kOnce && first > Moment<k()>::kPass && n_ > 0) found[k()] = *shared_extremes(k());
    });
#pragma unroll(kOnce ? 3 : 1)
    for (int pass = first; pass <= last; ++pass) {
      if (pass == kRelate && !kRelative) continue;
      for (int begin = 0; begin < end; begin += kChunk) {
        if (!once || pass == kMeasure) {
          compute(begin, pass == kMeasure);
          if (!kRepays && (once || pass == kEncode)) store_params();
        }
        if (kRelative && pass > kMeasure && (!once || pass == kRelate)) relate(found, once || pass == kEncode);
        each_of<kMoments>([&](auto k) {
          if (pass == kEncode) {
            if constexpr (!Moment<k()>::kIsUnit) store_codes<k()>(Scales<typename Moment<k()>::Coder>(found[k()]).x);
            if (kRepays && Moment<k()>::kIsRelative) store_params();
          } else if (pass == Moment<k()>::kPass) {
            widen<k()>(found[k()]);
          }
        });
      }
      each_of<kMoments>([&](auto k) {
        if (pass != Moment<k()>::kPass) return;
        agree<k()>(found[k()]);
        if (!kOnce && kernel_row_.cut && lane_ == 0 && n_ > 0) *shared_extremes(k()) = found[k()];
      });
    }
    if (last == kEncode) store_scales(found);
  }

  // Reads and updates the lane's elements of the chunk from `begin` on. Missing elements are zeros.
  SHARDOPT_DEVICE void compute(int begin, bool counts) {
    find_span(begin);
    const int32_t largest = update<false>(counts);
    if (largest >= kLargeBits && prepared_.skips) update<true>(counts);
  }

  // Finds the lane's elements of the chunk from `begin` on.
  SHARDOPT_DEVICE void find_span(int begin) {
    const int left = n_ - begin - lane_ * kLane;
    span_.element = element_ + begin;
    span_.n = left < 0 ? 0 : left < kLane ? left : kLane;
    span_.in_words = aligned_ && left >= kLane;
  }

  // Computes the terms of the lane's elements of the chunk from `begin` on: zeros for missing elements and lost
  // updates. factors: the second factors, for sums of products.
  SHARDOPT_DEVICE void compute_terms(float (*terms)[kLane], float (*factors)[kLane], int begin) {
    find_span(begin);
    float gradient[kLane], old[kMoments + 1][kLane];
    load_weights(param_, streams_, span_);
    load_gradients(gradient, streams_, span_);
    decode(old);
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      const float g = gradient[i] * gradient_scale_;
      float moment[kMoments + 1], x[kSumsOf<Rule>], y[kSumsOf<Rule>];
      each_of<kMoments>([&](auto k) {
        const float decoded = old[k()][i];
        moment[k()] = Moment<k()>::kIsRoot ? decoded * decoded : decoded;
      });
      if constexpr (kHasProducts<Rule>) {
        rule_.terms(param_[i], g, moment, x, y);
      } else {
        rule_.terms(param_[i], g, moment, x);
      }
      each_of<kSumsOf<Rule>>([&](auto j) {
        const bool lost = prepared_.skips && is_lost(rule_, g, param_[i], x[j()], moment);
        terms[j()][i] = i >= span_.n || lost ? 0.0f : x[j()];
        if constexpr (kHasProducts<Rule>) factors[j()][i] = i >= span_.n ? 0.0f : y[j()];
      });
    }
  }

  // Updates the lane's elements in registers. Writes no memory, so that this may be repeated. kSkips: elements whose
  // update is lost stay unchanged. Returns the maximum of largest_product over the elements.
  template <bool kSkips>
  SHARDOPT_DEVICE int32_t update(bool counts) {
    float gradient[kLane], old[kMoments + 1][kLane];
    load_weights(param_, streams_, span_);
    load_gradients(gradient, streams_, span_);
    decode(old);
    const Gains gains = gains_of(rule_);
    int32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      const float g = gradient[i] * gradient_scale_;
      largest = max_int(largest, largest_product(gains, g, param_[i]));
      float param = param_[i], moment[kMoments + 1], roots[kMoments + 1];
      each_of<kMoments>([&](auto k) {
        const float x = old[k()][i];
        moment[k()] = Moment<k()>::kIsRoot ? x * x : x;
      });
      rule_.update(param, g, moment, roots);
      const bool lost = kSkips && is_lost(rule_, g, param_[i], param, moment);
      if (lost) skipped_ += counts;
      param_[i] = lost ? param_[i] : param;
      each_of<kMoments>([&](auto k) {
        const float x = Moment<k()>::kIsRoot ? roots[Moment<k()>::kRoot] : moment[k()];
        kept_[k()][i] = i >= span_.n ? 0.0f : lost && !Moment<k()>::kIsExact ? old[k()][i] : x;
      });
    }
    return largest;
  }

  // Decodes the moments, or the roots of moments that are coded by their roots.
  SHARDOPT_DEVICE void decode(float (&moment)[kMoments + 1][kLane]) const {
    each_of<kMoments>([&](auto k) {
      using Kept = Moment<k()>;
      const auto codes = load_lane<typename Kept::Code>(codes_[k()], span_);
      const typename Kept::Coder coder(old_scales<typename Kept::Coder>(k()).x, table_);
#pragma unroll
      for (int i = 0; i < kLane; ++i) moment[k()][i] = coder.decode(as_number(codes.x[i]));
    });
    each_of<kMoments>([&](auto k) {
      if constexpr (Moment<k()>::kIsRelative) {
#pragma unroll
        for (int i = 0; i < kLane; ++i) moment[k()][i] *= moment[kUnsigned][i];
      }
    });
  }

  // Encodes the unsigned moment in units of whose root signed moments are coded, and divides these signed moments by
  // that root as decoded.
  SHARDOPT_DEVICE void relate(const Extremes* found, bool stores) {
    if constexpr (kRelative) {
      using Unit = Moment<kUnsigned>;
      using Coder = typename Unit::Coder;
      const Coder coder(Scales<Coder>(found[kUnsigned]).x, table_);
      Vector<typename Unit::Code> codes;
      const Dither dither = prepared_.dither.from(global_index());
#pragma unroll
      for (int i = 0; i < kLane; ++i) {
        const float x = kept_[kUnsigned][i];
        float unit;
        codes.x[i] = static_cast<typename Unit::Code>(coder.encode(x, unit, dither.bits_at(i)));
        if constexpr (kRepays) units_.x[i] = unit;
        const bool is_zero = bits(x) == 0;
        const float inverse = reciprocal(is_zero ? 1.0f : unit);  // not of 0, which takes long
        each_of<kMoments>([&](auto k) {
          if (Moment<k()>::kIsRelative) kept_[k()][i] = is_zero ? 0.0f : kept_[k()][i] * inverse;
        });
      }
      if constexpr (kSharesCodes<Codec>) {
        shared_ = codes;
      } else {
        if (stores) store_lane(codes_[kUnsigned], codes, span_);
      }
    }
  }

  // Encodes a moment. If the rule repays, moves the parameters for the codes' rounding error.
  template <int k>
  SHARDOPT_DEVICE void store_codes(const float* scales) {
    const typename Moment<k>::Coder coder(scales, table_);
    Vector<typename Moment<k>::Code> codes;
    const Dither dither = prepared_.dither.from(global_index());
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      codes.x[i] = static_cast<typename Moment<k>::Code>(coder.encode(kept_[k][i], dither.bits_at(i)));
      if constexpr (kSharesCodes<Codec>) codes.x[i] += shared_.x[i];
      if constexpr (kRepays && Moment<k>::kIsRelative) {
        const float error = (kept_[k][i] - coder.decode(as_number(codes.x[i]))) * units_.x[i];
        param_[i] = rule_.repaid(param_[i], error, units_.x[i]);
      }
    }
    store_lane(codes_[k], codes, span_);
  }

  SHARDOPT_DEVICE void store_params() const { store_weights(param_, streams_, span_, prepared_.step, global_index()); }

  // The span's first element in the flattened global parameter, modulo 2^32.
  SHARDOPT_DEVICE uint32_t global_index() const { return global_ + static_cast<uint32_t>(span_.element - element_); }

  SHARDOPT_DEVICE void store_scales(const Extremes* found) const {
    __syncwarp();  // all lanes have read the old scales
    if (lane_ > 0 || n_ == 0) return;
    each_of<kMoments>([&](auto k) {
      using Coder = typename Moment<k()>::Coder;
      const Scales<Coder> scales(found[k()]);
      for (int i = 0; i < Coder::kScales; ++i) scales_of<Coder>(k())[i] = scales.x[i];
    });
  }

  template <int k>
  SHARDOPT_DEVICE void widen(Extremes& e) const {
    uint32_t smallest = ~0u;  // bits of the smallest magnitude above zero, less one
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      const int32_t b = magnitude_bits(kept_[k][i]);
      e.high = max_int(e.high, b);
      smallest = min(smallest, static_cast<uint32_t>(b) - 1u);
    }
    if (Moment<k>::kNeedsSmallest && smallest != ~0u) {
      e.low = max_int(e.low, kInfinityBits - static_cast<int32_t>(smallest + 1));
    }
  }

  // Makes each lane's extremes those of the whole block.
  template <int k>
  SHARDOPT_DEVICE void agree(Extremes& e) const {
#pragma unroll
    for (int lane_bit = 1; lane_bit < kWarp; lane_bit *= 2) {
      if (lane_bit >= lanes_) continue;
      e.high = max_int(e.high, exchange(e.high, lane_bit));
      if (Moment<k>::kNeedsSmallest) e.low = max_int(e.low, exchange(e.low, lane_bit));
    }
  }

  template <class Coder>
  SHARDOPT_DEVICE float* scales_of(int moment) const {
    return reinterpret_cast<float*>(kernel_row_.scales[moment]) + Coder::kScales * scale_index_;
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
    return reinterpret_cast<Extremes*>(kernel_row_.extremes[moment]) + scale_index_;
  }

  const KernelRow& kernel_row_;
  const Streams streams_;
  const Prepared<Rule>& prepared_;
  const Rule rule_;
  const float gradient_scale_;
  const float* const table_;
  const Phase phase_;
  uint64_t codes_[kMoments + 1];
  bool aligned_;
  int lanes_ = 0, lane_ = 0;  // number of lanes of a block, and this lane's index among them
  int64_t left_ = 0;          // elements from the block's first element to its row's end
  int64_t element_ = 0;       // index of the lane's first element in the block's first chunk
  uint32_t global_ = 0;       // index of that element in the flattened global parameter, modulo 2^32
  int64_t scale_index_ = 0;   // index of the block in scales and extremes
  int n_ = 0;                 // elements of the block
  Span span_ = {};            // the lane's elements in the current chunk
  int skipped_ = 0;
  float param_[kLane];
  float kept_[kMoments + 1][kLane];  // the moments; of a moment that is coded by its root, the root
  // units_: the decoded root, if the rule repays. shared_: the unsigned moment's part of the code, if moments share
  // codes.
  std::conditional_t<kRepays, Vector<float>, Nothing> units_;
  std::conditional_t<kSharesCodes<Codec>, Vector<typename Codec::Code>, Nothing> shared_;
};

SHARDOPT_END_NAMESPACE
