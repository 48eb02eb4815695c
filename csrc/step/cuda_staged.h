// The step of whole blocks of 128 elements, and of the shorter ones at the ends of rows, wherever they begin: chunks of
// consecutive blocks are copied into shared memory by words of 16 bytes, stepped there in place, and copied back.
//
// Eight lanes step a long block, four lanes a short one, with up to sixteen elements per lane, each read and written by
// itself. Neighbouring lanes take neighbouring elements, so that no two lanes wait for the same bank. Lanes take their
// elements from windows of consecutive elements which cover the block. If windows overlap, or lanes have no block of
// their own, an element is stepped twice, to the same bits.
//
// Words that also hold elements of other chunks are read whole; only the chunk's own elements are written. If
// BlockArithmetic cannot step an element, the whole chunk is left to WarpStepper, and nothing is copied back.
#pragma once

#include <cuda_pipeline.h>

#include "step/cuda_block.h"
#include "step/cuda_chunk.h"

SHARDOPT_BEGIN_NAMESPACE

constexpr int kWord = 16;  // bytes

template <class Rule, class Codec, WeightFormat kWeight, DType kGradient>
class StagedStepper : BlockArithmetic<Rule, Codec, kWeight, kGradient> {
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

  // Elements as bytes, beginning with the whole 16-byte word that has the first element.
  template <class T>
  struct alignas(kWord) Staged {
    static constexpr int kWords = (kChunkElements * static_cast<int>(sizeof(T)) + 2 * kWord - 2) / kWord;
    char bytes[kWords * kWord];
  };

 public:
  using typename Arithmetic::Table;

  // A chunk in shared memory.
  struct StageWithoutLow {
    Staged<High> high;
    Staged<Gradient> gradient;
    Staged<uint8_t> codes[kMoments];
    float unsigned_scales[kHasUnsigned ? kChunkBlocks * Unsigned::kScales : 1];
    float signed_scales[kChunkBlocks * Signed::kScales];
  };
  struct StageWithLow : StageWithoutLow {
    Staged<Low> low;
  };
  using Stage = std::conditional_t<kHasLow, StageWithLow, StageWithoutLow>;
  static_assert(kAlignedWarps * sizeof(Stage) + sizeof(Table) <= kSharedBytes, "too much shared memory");

  SHARDOPT_DEVICE StagedStepper(const KernelRow& kernel_row, const Prepared<Rule>& prepared, const Table& table,
                                Stage& stage)
      : Arithmetic(prepared, table),
        kernel_row_(kernel_row),
        stage_(stage),
        lane_(static_cast<int>(threadIdx.x) % kWarp),
        dither_(prepared.dither) {
    if constexpr (kWeight == WeightFormat::kBFloat16Stochastic) noise_ = Noise(kernel_row.noise_key, prepared.step, 0);
  }

  // Steps a chunk; returns false if the chunk is left unchanged.
  SHARDOPT_DEVICE bool step(const Chunk& chunk) {
    const int count = chunk.rows * chunk.row_elements, blocks = chunk.rows * chunk.row_blocks;
    high_ = copy_in<High>(stage_.high, kernel_row_.param, chunk.element, count);
    gradient_ = copy_in<Gradient>(stage_.gradient, kernel_row_.gradient, chunk.element, count);
    if constexpr (kHasLow) low_ = copy_in<Low>(stage_.low, kernel_row_.low_bits, chunk.element, count);
#pragma unroll
    for (int k = 0; k < kMoments; ++k) {
      codes_[k] = copy_in<uint8_t>(stage_.codes[k], kernel_row_.codes[k], chunk.element, count);
    }
    const auto copy_scale = [](float* staged, float* kept) { __pipeline_memcpy_async(staged, kept, sizeof *kept); };
    for_scales(chunk.scale, blocks, copy_scale);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncwarp();
    const bool stepped = step_blocks(chunk);
    __syncwarp();
    if (stepped) {
      copy_out<High>(stage_.high, kernel_row_.param, chunk.element, count);
      if constexpr (kHasLow) copy_out<Low>(stage_.low, kernel_row_.low_bits, chunk.element, count);
#pragma unroll
      for (int k = 0; k < kMoments; ++k) copy_out<uint8_t>(stage_.codes[k], kernel_row_.codes[k], chunk.element, count);
      for_scales(chunk.scale, blocks, [](float* staged, float* kept) { *kept = *staged; });
      __syncwarp();  // before the next chunk is copied into the stage
    }
    return stepped;
  }

 private:
  template <class T>
  SHARDOPT_DEVICE static uint64_t at(uint64_t address, int64_t index) {
    return address + static_cast<uint64_t>(index) * sizeof(T);
  }

  // Makes nvcc compute an address here, once, instead of at each use.
  template <class T>
  SHARDOPT_DEVICE static T* settled(T* address) {
    asm("" : "+l"(address));
    return address;
  }

  // Begins to copy elements of a tensor into the stage. The first element has the same offset within a word in the
  // stage as in the tensor.
  template <class T>
  SHARDOPT_DEVICE T* copy_in(Staged<T>& to, uint64_t tensor, int64_t element, int count) const {
    const uint64_t address = at<T>(tensor, element);
    const auto offset = static_cast<uint32_t>(address % kWord);
    const auto words = static_cast<int>((offset + static_cast<uint32_t>(count * sizeof(T)) + kWord - 1) / kWord);
    const char* const from = settled(reinterpret_cast<const char*>(address - offset) + lane_ * kWord);
    char* const mine = to.bytes + lane_ * kWord;
#pragma unroll
    for (int word = 0; word < Staged<T>::kWords; word += kWarp) {
      if (word < words - lane_) __pipeline_memcpy_async(mine + word * kWord, from + word * kWord, kWord);
    }
    return reinterpret_cast<T*>(to.bytes + offset);
  }

  // Copies whole words back, and elements in incomplete words one by one.
  template <class T>
  SHARDOPT_DEVICE void copy_out(const Staged<T>& from, uint64_t tensor, int64_t element, int count) const {
    const uint64_t address = at<T>(tensor, element);
    const auto offset = static_cast<uint32_t>(address % kWord), end = offset + static_cast<uint32_t>(count * sizeof(T));
    const auto first = static_cast<int>((offset + kWord - 1) / kWord), whole = static_cast<int>(end / kWord);
    char* const to = reinterpret_cast<char*>(address - offset);
    char* const mine = settled(to + lane_ * kWord);
    const auto* const words = reinterpret_cast<const Words<T, kWord / sizeof(T)>*>(from.bytes) + lane_;
#pragma unroll
    for (int word = 0; word < Staged<T>::kWords; word += kWarp) {
      if (word < whole - lane_ && (word > 0 || lane_ >= first)) store_streaming(mine + word * kWord, words[word]);
    }
    const int in_word = lane_ % 16 * static_cast<int>(sizeof(T));
    const int byte = (lane_ < 16 ? first - 1 : whole) * kWord + in_word;
    if (in_word < kWord && byte >= static_cast<int>(offset) && byte < static_cast<int>(end)) {
      *reinterpret_cast<T*>(to + byte) = *reinterpret_cast<const T*>(from.bytes + byte);
    }
  }

  // Calls run(staged, kept) for each scale of a chunk: its address in the stage and in the tensor.
  template <class Do>
  SHARDOPT_DEVICE void for_scales(int64_t first, int blocks, Do run) const {
    if constexpr (kHasUnsigned) {
      of_moment<Unsigned::kScales>(stage_.unsigned_scales, kernel_row_.scales[kUnsigned], first, blocks, run);
    }
    of_moment<Signed::kScales>(stage_.signed_scales, kernel_row_.scales[kSigned], first, blocks, run);
  }

  template <int kScales, class Do>
  SHARDOPT_DEVICE void of_moment(float* staged, uint64_t address, int64_t first, int blocks, Do run) const {
    float* const kept = settled(reinterpret_cast<float*>(address) + first * kScales + lane_);
#pragma unroll
    for (int i = 0; i < kChunkBlocks * kScales; i += kWarp) {
      if (i < blocks * kScales - lane_) run(staged + lane_ + i, kept + i);
    }
  }

  SHARDOPT_DEVICE bool step_blocks(const Chunk& chunk) {
    const int rest = chunk.row_elements & (kAlignedBlock - 1);
    const bool has_short = rest > 0 && rest < kLongBlock;
    const int long_blocks = chunk.row_blocks - has_short;
    bool stepped = true;
    if (long_blocks > 0) {
#pragma unroll 1
      for (int block = 0; block < chunk.rows * long_blocks; block += kLongTurn) {
        const int index = min_int(block + lane_ / kLongLanes, chunk.rows * long_blocks - 1);
        const int row = static_cast<int>(static_cast<uint32_t>(index) * chunk.inverse >> 16);
        const int in_row = index - row * long_blocks, begin = in_row * kAlignedBlock;
        const int n = min_int(kAlignedBlock, chunk.row_elements - begin);
        stepped = step_turn<kLongLanes>(chunk, row, in_row, n);
        if (!stepped) return false;
      }
    }
    if (has_short) {
#pragma unroll 1
      for (int block = 0; block < chunk.rows; block += kShortTurn) {
        const int row = min_int(block + lane_ / kShortLanes, chunk.rows - 1);
        stepped = step_turn<kShortLanes>(chunk, row, long_blocks, rest);
        if (!stepped) return false;
      }
    }
    return stepped;
  }

  // Indices [kFirst, kFirst + kCount) of a lane's elements in its registers.
  template <int kFirst, int kCount>
  struct Slots {
    static constexpr int kBegin = kFirst, kEnd = kFirst + kCount;
  };

  // Calls run(slots, first) for each window of a block of n elements: the slots of the window's elements, and the
  // window's first element. In a turn of short blocks, all blocks have the same length.
  template <int kLanes, class Do>
  SHARDOPT_DEVICE static void in_windows(int n, Do run) {
    if constexpr (kLanes == kLongLanes) {
      run(Slots<0, 8>{}, 0);
      run(Slots<8, 8>{}, n - 64);
    } else {
      const int full = (n - 1) / kLanes;
      if (full & 8) run(Slots<0, 8>{}, 0);
      if (full & 7) {
        if (full & 4) run(Slots<8, 4>{}, (full & 8) * kLanes);
        if (full & 2) run(Slots<12, 2>{}, (full & 12) * kLanes);
        if (full & 1) run(Slots<14, 1>{}, (full & 14) * kLanes);
      }
      run(Slots<15, 1>{}, max_int(n - kLanes, 0));
    }
  }

  // Steps a block per kLanes lanes, in the stage; returns false if any block cannot be stepped.
  template <int kLanes>
  SHARDOPT_DEVICE bool step_turn(const Chunk& chunk, int row, int in_row, int n) {
    const int in_block = min_int(lane_ % kLanes, n - 1);
    const int element = row * chunk.row_elements + in_row * kAlignedBlock + in_block;
    const int block = row * chunk.row_blocks + in_row;
    High* const high = high_ + element;
    const Gradient* const gradient = gradient_ + element;
    Low* const low = low_ + (kHasLow ? element : 0);
    uint8_t* const signed_codes = codes_[kSigned] + element;
    uint8_t* const unsigned_codes = codes_[kHasUnsigned ? kUnsigned : kSigned] + element;
    float* const unsigned_scales = stage_.unsigned_scales + (kHasUnsigned ? block * Unsigned::kScales : 0);
    float* const signed_scales = stage_.signed_scales + block * Signed::kScales;
    float weight[kEach], root[kEach], moment[kEach];
    Found found;
    constexpr bool kZeros = kHasUnsigned;
    {
      const Signed signed_coder(signed_scales, table_);
      const Unsigned unsigned_coder = this->unsigned_decoder(unsigned_scales);
      in_windows<kLanes>(n, [&](auto slots, int start) {
#pragma unroll
        for (int i = slots.kBegin; i < slots.kEnd; ++i) {
          const int at = start + (i - slots.kBegin) * kLanes;
          float param = number_of(high[at]);
          if constexpr (kHasLow) param = this->join(param, low[at] * (1 << (16 - kLowBits)));
          this->template update_element<kZeros>(found, param, number_of(gradient[at]), unsigned_codes[at],
                                                unsigned_coder, values_.value(signed_codes[at], 0) * signed_coder.scale,
                                                weight[i], root[i], moment[i]);
        }
      });
    }
    bool usual = this->template is_usual<kZeros>(found);
    __syncwarp();  // all lanes have read the memory that is written from here on
    float new_scales[Unsigned::kScales + 1] = {}, largest = 0.0f;
    if constexpr (kHasUnsigned) {
      const Extremes e = Arithmetic::template agreed<kLanes, kZeros>(found);
      usual = usual && Unsigned::is_even(e);
      Unsigned::measure(e, new_scales);
    }
    const uint32_t global = chunk.global + static_cast<uint32_t>(in_row * kAlignedBlock + in_block) +
                            static_cast<uint32_t>(row) * static_cast<uint32_t>(kernel_row_.global_row_numel);
    const Dither dither = dither_.from(global);
    Noise noise = noise_;
    noise.first += global;
    const Unsigned coder(new_scales, table_, kHasUnsigned ? quick_reciprocal(Unsigned::inverted(new_scales)) : 0.0f);
    in_windows<kLanes>(n, [&](auto slots, int start) {
#pragma unroll
      for (int i = slots.kBegin; i < slots.kEnd; ++i) {
        const int at = start + (i - slots.kBegin) * kLanes;
        store_weight(high + at, low + at, weight[i], noise, at);
        if constexpr (kHasUnsigned) {
          const uint32_t code =
              Arithmetic::template encode_unsigned<kZeros>(coder, root[i], moment[i], dither.bits_at(at));
          unsigned_codes[at] = static_cast<uint8_t>(code);
          Arithmetic::clear_beside_zero(root[i], moment[i]);
        }
        largest = larger(largest, fabsf(moment[i]));
      }
    });
    largest = Arithmetic::template agreed<kLanes>(largest);
    usual = usual && largest < kLargestQuickMoment;  // false for NaN, too
    if (!__all_sync(0xffffffffu, usual)) return false;
    float scales[Signed::kScales];
    Signed::measure({bits(largest), 0}, scales);
    const Signed encoder(scales, table_, quick_reciprocal(Signed::inverted(scales)));
    in_windows<kLanes>(n, [&](auto slots, int start) {
#pragma unroll
      for (int i = slots.kBegin; i < slots.kEnd; ++i) {
        const int at = start + (i - slots.kBegin) * kLanes;
        signed_codes[at] = static_cast<uint8_t>(encoder.encode(Quick(moment[i]), 0));
      }
    });
    if (in_block == 0) {
      for (int i = 0; kHasUnsigned && i < Unsigned::kScales; ++i) unsigned_scales[i] = new_scales[i];
      for (int i = 0; i < Signed::kScales; ++i) signed_scales[i] = scales[i];
    }
    return true;
  }

  SHARDOPT_DEVICE static float number_of(float x) { return x; }
  SHARDOPT_DEVICE static float number_of(uint16_t x) { return float_from_bf16(as_number(x)); }

  SHARDOPT_DEVICE static void store_weight(High* high, Low* low, float weight, const Noise& noise, int index) {
    if constexpr (kWeight == WeightFormat::kFloat32) {
      *high = weight;
    } else if constexpr (kHasLow) {
      const uint32_t raised = raised_word<kLowBits>(weight);
      *high = static_cast<uint16_t>(raised >> 16);
      *low = static_cast<Low>((raised ^ 0x8000u) >> (16 - kLowBits));
    } else if constexpr (kWeight == WeightFormat::kBFloat16Stochastic) {
      *high = static_cast<uint16_t>(bf16_at_random(weight, noise.bits_at(index)));
    } else {
      *high = static_cast<uint16_t>(nearest_bf16(weight));
    }
  }

  const KernelRow& kernel_row_;
  Stage& stage_;
  const int lane_;
  const Dither dither_;
  High* high_;  // the chunk's first elements in the stage
  Gradient* gradient_;
  Low* low_ = nullptr;
  uint8_t* codes_[kMoments];
  Noise noise_;
};

SHARDOPT_END_NAMESPACE
