// The step of whole blocks of 128, 256 or 512 elements that lie one after the other, aligned, in a usual format:
// sixteen elements per lane, 128 elements per eight lanes, copied asynchronously into a ring in shared memory one or
// two turns ahead.
//
// A turn of a warp is 512 elements. A turn whose unsigned codes are not all above zero takes some more instructions. A
// turn with numbers out of the ordinary or updates that would be lost is left to WarpStepper as a whole: lanes store
// nothing before all lanes know that the turn has none of these.
#pragma once

#include <cuda_pipeline.h>

#include "step/cuda_block.h"

SHARDOPT_BEGIN_NAMESPACE

constexpr int kBlockLanes = kAlignedBlock / kEach;  // lanes of a block, at least
constexpr int kTurn = kWarp * kEach;                // elements of a turn

template <class Rule, class Codec, WeightFormat kWeight, DType kGradient>
class AlignedStepper : BlockArithmetic<Rule, Codec, kWeight, kGradient> {
  using Arithmetic = BlockArithmetic<Rule, Codec, kWeight, kGradient>;
  using Arithmetic::kHasLow;
  using Arithmetic::kHasUnsigned;
  using Arithmetic::kLowBits;
  using Arithmetic::kMoments;
  using Arithmetic::kSigned;
  using Arithmetic::kUnsigned;
  using Arithmetic::quick_reciprocal;
  using Arithmetic::table_;
  using Arithmetic::values_;
  using typename Arithmetic::Found;
  using typename Arithmetic::Gradient;
  using typename Arithmetic::High;
  using typename Arithmetic::Low;
  using typename Arithmetic::Signed;
  using typename Arithmetic::Unsigned;
  // The number of neighbouring elements of a lane: as many as 16 bytes hold of the widest type.
  static constexpr int kPart = sizeof(High) == 4 || sizeof(Gradient) == 4 ? 4 : 8;
  static constexpr int kParts = kEach / kPart;
  template <class T>
  using Part = Words<T, kPart>;
  using UnsignedScales = Words<float, Unsigned::kScales>;
  using SignedScales = Words<float, Signed::kScales>;

  // The inputs of a lane in a turn. Each lane copies its own inputs and so does not wait for other lanes.
  struct alignas(16) InputsWithoutLow {
    Part<High> high[kParts];
    Part<Gradient> gradient[kParts];
    Part<uint8_t> codes[kParts][kMoments];
    UnsignedScales unsigned_scales;
    SignedScales signed_scales;
  };
  struct InputsWithLow : InputsWithoutLow {
    Part<Low> low[kParts];
  };
  using Inputs = std::conditional_t<kHasLow, InputsWithLow, InputsWithoutLow>;
  // The distance from lane to lane in 16 bytes: odd, so that lanes use different banks of the shared memory.
  static constexpr int kUnits = static_cast<int>(sizeof(Inputs) / 16) | 1;
  struct alignas(16) Stage {
    char bytes[kWarp][kUnits * 16];

    SHARDOPT_DEVICE Inputs* of(int lane) { return reinterpret_cast<Inputs*>(bytes[lane]); }
  };

 public:
  using typename Arithmetic::Table;

  // The number of turns in the ring: as many as static shared memory has room for, at most three.
  static constexpr int kStages = kAlignedWarps * 3 * sizeof(Stage) + sizeof(Table) <= kSharedBytes ? 3 : 2;
  using Ring = Stage[kStages];
  static_assert(kAlignedWarps * sizeof(Ring) + sizeof(Table) <= kSharedBytes, "too much shared memory");

  SHARDOPT_DEVICE AlignedStepper(const KernelRow& kernel_row, const Prepared<Rule>& prepared, const Table& table,
                                 int64_t first_block, Ring& ring)
      : Arithmetic(prepared, table),
        lane_(static_cast<int>(threadIdx.x) % kWarp),
        block_lanes_(kernel_row.block_size / kEach),
        turn_blocks_(kTurn / kernel_row.block_size) {
    const int64_t block = first_block + lane_ / block_lanes_;
    const int64_t first = first_block * kernel_row.block_size + lane_ / kBlockLanes * kAlignedBlock;
    const int64_t element = first + lane_ % kBlockLanes * kPart;
    for (int i = 0; i < kStages; ++i) inputs_[i] = ring[i].of(lane_);
    high_ = at<High>(kernel_row.param, element);
    gradient_ = at<Gradient>(kernel_row.gradient, element);
    low_ = at<Low>(kernel_row.low_bits, element);
    for (int k = 0; k < kMoments; ++k) codes_[k] = at<uint8_t>(kernel_row.codes[k], element);
    if constexpr (kHasUnsigned) unsigned_scales_ = at<float>(kernel_row.scales[kUnsigned], block * Unsigned::kScales);
    signed_scales_ = at<float>(kernel_row.scales[kSigned], block * Signed::kScales);
    dither_ = prepared.dither.from(kernel_row.first_element + element);
    if constexpr (kWeight == WeightFormat::kBFloat16Stochastic) {
      noise_ = Noise(kernel_row.noise_key, prepared.step, kernel_row.first_element + element);
    }
  }

  // Whether a kernel row's addresses are aligned for this stepper.
  SHARDOPT_DEVICE static bool is_aligned(const KernelRow& kernel_row) {
    uint64_t codes = 0;
    for (int k = 0; k < kMoments; ++k) codes |= kernel_row.codes[k];
    bool aligned = (kernel_row.param | kernel_row.gradient | kernel_row.low_bits) % 16 == 0 && codes % 8 == 0;
    if constexpr (kHasUnsigned) aligned &= kernel_row.scales[kUnsigned] % sizeof(UnsignedScales) == 0;
    return aligned;
  }

  // Begins to copy the inputs of the first of `turns` turns.
  SHARDOPT_DEVICE void begin(int turns) {
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      if (i < turns) fetch(*inputs_[i], i);
      __pipeline_commit();
    }
  }

  // Steps the next turn; returns false if the turn is left unchanged.
  SHARDOPT_DEVICE bool step(int turns_left) {
    __pipeline_wait_prior(kStages - 2);
    if (turns_left >= kStages) fetch(*inputs_[kStages - 1], kStages - 1);
    __pipeline_commit();
    Inputs* const inputs = inputs_[0];
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) inputs_[i] = inputs_[i + 1];
    inputs_[kStages - 1] = inputs;
    const bool stepped = has_zeros(*inputs) ? step<true>(*inputs) : step<false>(*inputs);
    advance();
    return stepped;
  }

 private:
  // Whether an unsigned code of the turn is zero.
  SHARDOPT_DEVICE static bool has_zeros(const Inputs& inputs) {
    if constexpr (kHasUnsigned) {
      uint32_t zeros = 0;
#pragma unroll
      for (int h = 0; h < kParts; ++h) zeros |= zero_bytes(Packed<uint8_t, kPart>(inputs.codes[h][kUnsigned]));
      return __any_sync(0xffffffffu, zeros != 0);
    } else {
      return false;
    }
  }

  template <bool kZeros>
  SHARDOPT_DEVICE bool step(const Inputs& inputs) {
    float weight[kEach], root[kEach], moment[kEach];
    const bool usual = update<kZeros>(inputs, weight, root, moment);
    return finish<kZeros>(usual, weight, root, moment);
  }

  template <class T>
  SHARDOPT_DEVICE static T* at(uint64_t address, int64_t index) {
    return reinterpret_cast<T*>(address) + index;
  }

  // Elements from the lane's first element to the first element of part h.
  SHARDOPT_DEVICE static constexpr int part(int h) { return h * kPart * kBlockLanes; }

  // Elements from the lane's first element to its i-th.
  SHARDOPT_DEVICE static constexpr int index_of(int i) { return part(i / kPart) + i % kPart; }

  template <class T>
  SHARDOPT_DEVICE static void copy(Part<T> (&to)[kParts], const T* from) {
#pragma unroll
    for (int h = 0; h < kParts; ++h) __pipeline_memcpy_async(&to[h], from + part(h), sizeof to[h]);
  }

  // Begins to copy the inputs of the turn that comes after `ahead` others.
  SHARDOPT_DEVICE void fetch(Inputs& to, int ahead) const {
    copy(to.high, high_ + ahead * kTurn);
    copy(to.gradient, gradient_ + ahead * kTurn);
    if constexpr (kHasLow) copy(to.low, low_ + ahead * kTurn);
#pragma unroll
    for (int k = 0; k < kMoments; ++k) {
#pragma unroll
      for (int h = 0; h < kParts; ++h)
        __pipeline_memcpy_async(&to.codes[h][k], codes_[k] + ahead * kTurn + part(h), sizeof to.codes[h][k]);
    }
    const int blocks = ahead * turn_blocks_;
    if constexpr (kHasUnsigned) {
      __pipeline_memcpy_async(&to.unsigned_scales, unsigned_scales_ + blocks * Unsigned::kScales,
                              sizeof to.unsigned_scales);
    }
    __pipeline_memcpy_async(&to.signed_scales, signed_scales_ + blocks * Signed::kScales, sizeof to.signed_scales);
  }

  SHARDOPT_DEVICE void advance() {
    high_ += kTurn;
    gradient_ += kTurn;
    if constexpr (kHasLow) low_ += kTurn;
#pragma unroll
    for (int k = 0; k < kMoments; ++k) codes_[k] += kTurn;
    if constexpr (kHasUnsigned) unsigned_scales_ += turn_blocks_ * Unsigned::kScales;
    signed_scales_ += turn_blocks_ * Signed::kScales;
    dither_ = dither_.from(kTurn);
    if constexpr (kWeight == WeightFormat::kBFloat16Stochastic) noise_.first += kTurn;
  }

  // Computes the lane's new weights and moments, or an unsigned moment's root if the codec codes roots. Returns whether
  // all can be encoded.
  template <bool kZeros>
  SHARDOPT_DEVICE bool update(const Inputs& inputs, float (&weight)[kEach], float (&root)[kEach],
                              float (&moment)[kEach]) {
    const Signed signed_coder(inputs.signed_scales.x, table_);
    const Unsigned unsigned_coder = this->unsigned_decoder(inputs.unsigned_scales.x);
    Found found;
#pragma unroll
    for (int h = 0; h < kParts; ++h) {
      const Packed<High, kPart> weights(inputs.high[h]);
      const Packed<Gradient, kPart> gradients(inputs.gradient[h]);
      const Packed<uint8_t, kPart> signed_codes(inputs.codes[h][kSigned]);
      const Packed<uint8_t, kPart> unsigned_codes(inputs.codes[h][kHasUnsigned ? kUnsigned : kSigned]);
#pragma unroll
      for (int j = 0; j < kPart; ++j) {
        const int i = h * kPart + j;
        float param = weights.number(j);
        if constexpr (kHasLow) {
          const Packed<Low, kPart> low(inputs.low[h]);
          param = this->join(
              param, kLowBits == 8 ? signed_byte_of(low.words[j / 4], j % 4) : signed_half_of(low.words[j / 2], j % 2));
        }
        this->template update_element<kZeros>(found, param, gradients.number(j), unsigned_codes.code(j), unsigned_coder,
                                              values_.value(signed_codes.words[j / 4], j % 4) * signed_coder.scale,
                                              weight[i], root[i], moment[i]);
      }
    }
    if constexpr (kHasUnsigned) found_ = found;
    return this->template is_usual<kZeros>(found);
  }

  // Encodes and stores the turn, if all lanes can encode their elements.
  template <bool kZeros>
  SHARDOPT_DEVICE bool finish(bool usual, const float (&weight)[kEach], float (&root)[kEach], float (&moment)[kEach]) {
    float unsigned_scales[Unsigned::kScales], signed_scales[Signed::kScales];
    Part<uint8_t> unsigned_codes[kParts], signed_codes[kParts];
    uint32_t codes[kEach];
    Part<High> high[kParts];
    Part<Low> low[kParts];
    round(weight, high, low);
    float largest = 0.0f;
    if constexpr (kHasUnsigned) {
      const Extremes e = Arithmetic::template agreed<kBlockLanes, kZeros>(found_, block_lanes_);
      usual = usual && Unsigned::is_even(e);
      Unsigned::measure(e, unsigned_scales);
      const Unsigned coder(unsigned_scales, table_, quick_reciprocal(Unsigned::inverted(unsigned_scales)));
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        codes[i] =
            Arithmetic::template encode_unsigned<kZeros>(coder, root[i], moment[i], dither_.bits_at(index_of(i)));
      }
      pack_bytes(unsigned_codes, codes, 0);
      if constexpr (kZeros) {
        int32_t all = 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) all |= bits(moment[i]);
        if ((all & kMagnitudeMask) != 0) {  // not of rows that no gradient has reached
#pragma unroll
          for (int i = 0; i < kEach; ++i) Arithmetic::clear_beside_zero(root[i], moment[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) largest = larger(largest, fabsf(moment[i]));
    largest = Arithmetic::template agreed<kBlockLanes>(largest, block_lanes_);
    usual = usual && largest < kLargestQuickMoment;  // false for NaN, too
    if (!__all_sync(0xffffffffu, usual)) return false;
    Signed::measure({bits(largest), 0}, signed_scales);
    const Signed coder(signed_scales, table_, quick_reciprocal(Signed::inverted(signed_scales)));
#pragma unroll
    for (int i = 0; i < kEach; ++i) codes[i] = static_cast<uint32_t>(coder.encode(Quick(moment[i]), 0));
    pack_bytes(signed_codes, codes, 0);
#pragma unroll
    for (int h = 0; h < kParts; ++h) {
      store_streaming(high_ + part(h), high[h]);
      if constexpr (kHasLow) store_streaming(low_ + part(h), low[h]);
      if constexpr (kHasUnsigned) store_streaming(codes_[kUnsigned] + part(h), unsigned_codes[h]);
      store_streaming(codes_[kSigned] + part(h), signed_codes[h]);
    }
    if ((lane_ & (block_lanes_ - 1)) == 0) {
      if constexpr (kHasUnsigned) {
        UnsignedScales scales;
        for (int i = 0; i < Unsigned::kScales; ++i) scales.x[i] = unsigned_scales[i];
        store_streaming(unsigned_scales_, scales);
      }
      SignedScales scales;
      for (int i = 0; i < Signed::kScales; ++i) scales.x[i] = signed_scales[i];
      store_streaming(signed_scales_, scales);
    }
    return true;
  }

  SHARDOPT_DEVICE void round(const float (&weight)[kEach], Part<High> (&high)[kParts], Part<Low> (&low)[kParts]) const {
    if constexpr (kWeight == WeightFormat::kFloat32) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) high[i / kPart].x[i % kPart] = weight[i];
    } else if constexpr (kHasLow) {
      uint32_t raised[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) raised[i] = raised_word<kLowBits>(weight[i]);
      pack_halves(high, raised, 1);
      if constexpr (kLowBits == 8) {
        pack_bytes(low, raised, 1, 0x80808080u);
      } else {
        uint32_t word[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) word[i] = static_cast<uint32_t>(bits(weight[i]));
        pack_halves(low, word, 0);
      }
    } else if constexpr (kWeight == WeightFormat::kBFloat16Stochastic) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        high[i / kPart].x[i % kPart] = static_cast<uint16_t>(bf16_at_random(weight[i], noise_.bits_at(index_of(i))));
      }
    } else {
#pragma unroll
      for (int h = 0; h < kParts; ++h) {
        float part_of[kLane];
#pragma unroll
        for (int j = 0; j < kPart; ++j) part_of[j] = weight[h * kPart + j];
        const Vector<uint16_t> words = bf16_lane(part_of);
        __builtin_memcpy(&high[h], &words, sizeof words);
      }
    }
  }

  const int lane_, block_lanes_, turn_blocks_;
  Inputs* inputs_[kStages];  // the lane's inputs of this turn and the following turns
  High* high_;
  const Gradient* gradient_;
  Low* low_;
  uint8_t* codes_[kMoments];
  float* unsigned_scales_ = nullptr;
  float* signed_scales_;
  Dither dither_;
  Noise noise_;
  Found found_;
};

SHARDOPT_END_NAMESPACE
