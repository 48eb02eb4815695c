// The rule and moments of a CUDA kernel, as far as they are known when compiling.
#pragma once

#include <type_traits>
#include <utility>

#include "step/cuda_lane.h"
#include "step/instances.h"

SHARDOPT_BEGIN_NAMESPACE

// Rule and scalars of a kernel row's tasks, from its group and its step count.
template <class Rule>
struct Prepared {
  Rule rule;
  float gradient_scale;
  float step;
  Dither dither;
  bool skips;
};

// Passes over a block, in order: measure the extremes of all moments but relative ones, measure relative moments,
// encode.
enum Pass { kMeasure = 0, kRelate = 1, kEncode = 2 };

// A number that is known when compiling; calling an Index gives the number.
template <int k>
struct Index {
  SHARDOPT_HD constexpr int operator()() const { return k; }
};

template <int... k, class Take>
SHARDOPT_DEVICE void each_index(std::integer_sequence<int, k...>, Take take) {
  (take(Index<k>{}), ...);
}

// Calls take(Index<k>{}) for k = 0 ... kCount - 1.
template <int kCount, class Take>
SHARDOPT_DEVICE void each_of(Take take) {
  each_index(std::make_integer_sequence<int, kCount>{}, take);
}

// How the k-th moment of a rule is kept in a state of this codec.
template <class Rule, class Codec, int k>
struct KeptMoment {
  using Kept = typename Rule::Kept;
  static constexpr MomentKind kKind = Kept::kKinds[k];
  static constexpr bool kIsUnsigned = is_unsigned(kKind);
  static constexpr bool kIsExact = kKind == MomentKind::kExact;
  using Used =
      std::conditional_t<kIsExact, Float32, std::conditional_t<kKind == MomentKind::kWide, WideCodec<Codec>, Codec>>;
  using Coder = std::conditional_t<kIsUnsigned, typename Used::Unsigned, typename Used::Signed>;
  using Code = typename Used::Code;
  static constexpr bool kIsRoot = Used::kRoot && kKind == MomentKind::kUnsigned;
  static constexpr int kRoot = Kept::root_of(k);  // index of its root among the rule's roots
  static constexpr bool kRelates = Codec::kRelative && Kept::kUnsigned >= 0;
  static constexpr bool kIsUnit = kRelates && k == Kept::kUnsigned;
  static constexpr bool kIsRelative = kRelates && kKind == MomentKind::kSigned;
  static constexpr int kPass = kIsRelative ? kRelate : kMeasure;  // the pass that measures the moment
  static constexpr bool kNeedsSmallest = kIsUnsigned && Coder::kMeasuresSmallest;
};

// The scales of a block with these extremes.
template <class Coder>
struct Scales {
  float x[Coder::kScales + 1];

  SHARDOPT_DEVICE explicit Scales(const Extremes& extremes) { Coder::measure(extremes, x); }
};

SHARDOPT_END_NAMESPACE
