// The arithmetic of blocks of kAlignedBlock elements in a usual format, element by element, and the agreement of a
// block's lanes: shared by AlignedStepper and StagedStepper, which differ in how they load and store elements.
//
// Numbers are of type QuickOf. Numbers out of the ordinary and updates that would be lost are noticed and left to
// WarpStepper. Unsigned moments may be zero, as of rows that no gradient has reached, where a function has kZeros.
#pragma once

#include "step/cuda_quick.h"
#include "step/cuda_stepper.h"
#include "step/cuda_words.h"

SHARDOPT_BEGIN_NAMESPACE

constexpr int kEach = 16;         // elements of a lane in a turn
constexpr int kAlignedWarps = 4;  // warps of a thread block
constexpr size_t kSharedBytes = 48 * 1024;

template <class Rule, class Codec, WeightFormat kWeight, DType kGradient>
class BlockArithmetic {
 public:
  static constexpr int kMoments = Rule::Kept::kCount;
  static constexpr int kUnsigned = Rule::Kept::kUnsigned;
  static constexpr int kSigned = kUnsigned == 0 ? 1 : 0;
  static constexpr bool kHasUnsigned = kUnsigned >= 0;
  static constexpr bool kRelative = Codec::kRelative && kHasUnsigned;
  using Unsigned = typename Codec::Unsigned;
  using Signed = typename Codec::Signed;
  using High = typename WeightTypes<kWeight>::High;
  static constexpr bool kHasLow = !std::is_void_v<typename WeightTypes<kWeight>::Low>;
  using Low = std::conditional_t<kHasLow, typename WeightTypes<kWeight>::Low, int8_t>;
  static constexpr int kLowBits = 8 * sizeof(Low);
  using Gradient = std::conditional_t<kGradient == DType::kFloat32, float, uint16_t>;

  // Look-up tables in shared memory: the values of signed codes, and the codec's table, if its coders need one.
  struct Table {
    static constexpr int kFloats = Codec::kCoderTable;
    float values[256];
    float codec[kFloats ? kFloats : 1];

    SHARDOPT_DEVICE void fill(const float* from) {
      for (int i = static_cast<int>(threadIdx.x); i < 256; i += static_cast<int>(blockDim.x))
        values[i] = Signed::value(Signed::values_in(from), i);
      for (int i = static_cast<int>(threadIdx.x); i < kFloats; i += static_cast<int>(blockDim.x)) codec[i] = from[i];
    }
  };

 protected:
  SHARDOPT_DEVICE BlockArithmetic(const Prepared<Rule>& prepared, const Table& table)
      : rule_(prepared.rule),
        gradient_scale_(prepared.gradient_scale),
        root_limit_(bits(root_limit(rule_))),
        param_gain_(gains_of(rule_).param),
        values_(table.values),
        table_(table.codec) {}

  // Properties of a lane's elements, gathered during the update.
  struct Found {
    uint32_t low = ~0u, high = 0;  // of roots; with kZeros, low is the least root above zero, less one
    int32_t largest_unsigned = 0;  // if the codec does not code roots
    float largest_gradient = 0.0f, largest_weight = 0.0f;  // gradient: with gains_of, and only without unsigned moments
  };

  // The coder that decodes a block's unsigned moment, given the block's scales.
  SHARDOPT_DEVICE Unsigned unsigned_decoder(const float* scales) const {
    const float none[2] = {1.0f, 1.0f};
    return Unsigned(kHasUnsigned ? scales : none, table_, 0.0f);
  }

  // Adds the low bits, at their place in a word, to a weight. If that turns the sign, the parameter is zero and the sum
  // is NaN; then the new weight is NaN, too, and not usual.
  SHARDOPT_DEVICE static float join(float high, int32_t low) {
    return float_from_bits(as_signed(as_unsigned(bits(high)) + as_unsigned(low)));
  }

  // Updates one element. Gives the new weight, the new signed moment as `moment`, and as `root` the new unsigned
  // moment, or its root if the codec codes roots. signed_value: the signed code's value, times the block's scale.
  template <bool kZeros>
  SHARDOPT_DEVICE void update_element(Found& found, float old_weight, float gradient, int32_t unsigned_code,
                                      const Unsigned& unsigned_coder, float signed_value, float& weight, float& root,
                                      float& moment) const {
    using Number = QuickOf<kZeros>;
    Number param = old_weight, r = 0.0f, m[kMoments + 1];
    const Number scaled = gradient * gradient_scale_;
    if constexpr (kHasUnsigned) {
      r = kZeros ? unsigned_coder.decode(unsigned_code) : unsigned_coder.decode_above_zero(unsigned_code);
      m[kUnsigned] = Codec::kRoot ? r * r : r;
    } else {
      found.largest_gradient = larger(found.largest_gradient, fabsf(scaled.x));
      if constexpr (kHasCoupledDecay<Rule>) {
        if (param_gain_ != 0.0f) found.largest_gradient = larger(found.largest_gradient, fabsf(param_gain_ * param.x));
      }
    }
    m[kSigned] = kRelative ? Number(signed_value) * r : Number(signed_value);
    rule_.update(param, scaled, m, &r);
    weight = param.x;
    if constexpr (kHasLow) found.largest_weight = larger(found.largest_weight, fabsf(param.x));
    moment = m[kSigned].x;
    if constexpr (kHasUnsigned) {
      const auto b = static_cast<uint32_t>(bits(r));
      found.low = min(found.low, kZeros ? b - 1u : b);
      found.high = max(found.high, b);
      root = Codec::kRoot ? r.x : m[kUnsigned].x;
      if constexpr (!Codec::kRoot) found.largest_unsigned = max_int(found.largest_unsigned, bits(root));
    }
  }

  // Whether a lane's elements can be encoded.
  template <bool kZeros>
  SHARDOPT_DEVICE bool is_usual(const Found& found) const {
    const bool usual_weights = !kHasLow || found.largest_weight <= float_from_bits(kLargestWord<kLowBits>);
    if constexpr (!kHasUnsigned) return usual_weights && found.largest_gradient < float_from_bits(kLargeBits);
    return usual_weights && found.low >= static_cast<uint32_t>(bits(kLeastQuickRoot) - kZeros) &&
           found.high < static_cast<uint32_t>(root_limit_);
  }

  // The extremes of a block's unsigned moment, given to all lanes of the block: kLanes, or `lanes` if they are more.
  template <int kLanes, bool kZeros>
  SHARDOPT_DEVICE static Extremes agreed(const Found& found, int lanes = kLanes) {
    Extremes e = {static_cast<int32_t>(found.high), static_cast<int32_t>(found.low)};
    if (kZeros) e.low = static_cast<int32_t>(min(found.low, uint32_t{kInfinityBits} - 1u)) + 1;
    if (!Codec::kRoot) e = {found.largest_unsigned, 0};
    const auto exchange_with = [&](int lane_bit) {
      e.high = max_int(e.high, exchange(e.high, lane_bit));
      if (Unsigned::kMeasuresSmallest) e.low = min_int(e.low, exchange(e.low, lane_bit));
    };
#pragma unroll
    for (int lane_bit = 1; lane_bit < kLanes; lane_bit *= 2) exchange_with(lane_bit);
#pragma unroll 1
    for (int lane_bit = kLanes; lane_bit < lanes; lane_bit *= 2) exchange_with(lane_bit);
    e.low = kInfinityBits - e.low;
    return e;
  }

  // The largest number of a block, given to all lanes of the block.
  template <int kLanes>
  SHARDOPT_DEVICE static float agreed(float largest, int lanes = kLanes) {
    const auto exchange_with = [&](int lane_bit) {
      largest = larger(largest, float_from_bits(exchange(bits(largest), lane_bit)));
    };
#pragma unroll
    for (int lane_bit = 1; lane_bit < kLanes; lane_bit *= 2) exchange_with(lane_bit);
#pragma unroll 1
    for (int lane_bit = kLanes; lane_bit < lanes; lane_bit *= 2) exchange_with(lane_bit);
    return largest;
  }

  // The code of an unsigned moment. Turns a relative signed moment into units of the decoded root; beside a root of
  // zero, clear_beside_zero is to follow.
  template <bool kZeros>
  SHARDOPT_DEVICE static uint32_t encode_unsigned(const Unsigned& coder, float root, float& moment, int32_t random) {
    if constexpr (kRelative) {
      Quick unit;
      const int32_t code =
          kZeros ? coder.encode_even(Quick(root), unit, random) : coder.encode_above_zero(Quick(root), unit, random);
      moment = moment * reciprocal(unit).x;
      return static_cast<uint32_t>(code);
    } else {
      const Quick x(root);
      return static_cast<uint32_t>(kZeros ? coder.encode(x, random) : coder.encode_above_zero(x, random));
    }
  }

  // Clears a relative signed moment beside a root of zero: of a gradient whose square is zero.
  SHARDOPT_DEVICE static void clear_beside_zero(float root, float& moment) {
    if constexpr (kRelative) moment *= one_above_zero(root);
  }

  SHARDOPT_DEVICE static float quick_reciprocal(float x) { return reciprocal(Quick(x)).x; }

  SHARDOPT_DEVICE static float root_limit(const Rule& rule) {
    if constexpr (kHasUnsigned) {
      return rule.root_limit();
    } else {
      return 0.0f;
    }
  }

  const Rule rule_;
  const float gradient_scale_;
  const int32_t root_limit_;
  const float param_gain_;
  const SharedTable values_;
  const float* const table_;
};

SHARDOPT_END_NAMESPACE
