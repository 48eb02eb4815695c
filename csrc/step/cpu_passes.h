// The passes over a run of blocks on the CPU. Each pass is compiled once: for a rule, for a coder, or for all of them.
// Passes hand floats to each other in the first-level cache.
#pragma once

#include <cstddef>
#include <type_traits>

#include "core/codec.h"
#include "core/rule.h"
#include "step/cpu_memory.h"

SHARDOPT_BEGIN_NAMESPACE

constexpr int kEach = 16;  // elements that a pass takes at a time; no block is smaller
constexpr int kEachPack = kEach / kLanes, kFour = 4 * kEach;

// Prefetches what will be read a page of floats after kCount elements: processors prefetch neither past a page nor past
// the short block at a row's end. Addresses without memory do no harm.
template <int kCount, class T>
SHARDOPT_HD void fetch_ahead(const T* from) {
  constexpr int kAhead = 1024, kLine = 64 / sizeof(T);
#pragma GCC unroll 8
  for (int i = 0; i < kCount; i += kLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uint64_t>(from) + sizeof(T) * (kAhead + i)));
  }
}

// Loads kEach elements, or the first `left` and zeros.
template <class T>
SHARDOPT_HD auto load_each(const T* from, int left) {
  if (left >= kEach) return load_lanes<kEachPack>(from);
  T copy[kEach] = {};
  copy_bytes(copy, from, sizeof(T) * (static_cast<unsigned>(left) % kEach));
  return load_lanes<kEachPack>(copy);
}

// Stores kEach elements, or the first `left`.
template <class T, class V>
SHARDOPT_HD void store_each(T* to, V x, int left) {
  if (left >= kEach) return store_lanes(to, x);
  T copy[kEach];
  store_lanes(copy, x);
  copy_bytes(to, copy, sizeof(T) * (static_cast<unsigned>(left) % kEach));
}

// A coder's passes over the blocks of a run, of n elements in all.
struct CoderPasses {
  int scales;  // float32 scales per block
  bool measures_smallest;
  void (*measure)(const Extremes& extremes, float* scales);
  void (*decode)(float* to, const void* codes, const float* scales, const float* table, int n, int block_size);
  // unit: receives the decoded values from an unsigned coder of a relative codec. A nullptr as unit or codes is not
  // written. dither: counts from the run's first element.
  void (*encode)(const float* from, void* codes, float* unit, const float* scales, const float* table, int n,
                 int block_size, const Dither& dither);
};

template <class Coder, class Code>
void decode_run(float* to, const void* codes, const float* scales, const float* table, int n, int block_size) {
  const auto from = static_cast<const Code*>(codes);
  for (int begin = 0; begin < n; begin += block_size, scales += Coder::kScales) {
    const Coder coder(scales, table);
    const int end = begin + block_size < n ? begin + block_size : n;
    for (int i = begin; i < end; i += kEach) store_lanes(to + i, coder.decode(load_each(from + i, end - i)));
  }
}

// How encode_run stores a code: alone, with its decoded value in `unit`, or added to the code in memory.
enum class Coding { kAlone, kWithUnit, kAdded };

template <class Coder, class Code, Coding kCoding>
void encode_run(const float* from, void* codes, float* unit, const float* scales, const float* table, int n,
                int block_size, const Dither& dither) {
  const auto to = static_cast<Code*>(codes);
  for (int begin = 0; begin < n; begin += block_size, scales += Coder::kScales) {
    const Coder coder(scales, table);
    const int end = begin + block_size < n ? begin + block_size : n;
    for (int i = begin; i < end; i += kEach) {
      const auto x = load_lanes<kEachPack>(from + i);
      const auto random = dither.bits_at(lane_index<kEachPack>() + i);
      if constexpr (kCoding == Coding::kWithUnit) {
        Floats<kEachPack> decoded;
        const auto code = coder.encode(x, decoded, random);
        if (unit) store_lanes(unit + i, decoded);
        if (to) store_each(to + i, code, end - i);
      } else if constexpr (kCoding == Coding::kAdded) {
        store_each(to + i, load_each(to + i, end - i) + coder.encode(x, random), end - i);
      } else {
        store_each(to + i, coder.encode(x, random), end - i);
      }
    }
  }
}

template <class Coder, class Code, Coding kCoding>
constexpr CoderPasses coder_passes() {
  return {Coder::kScales, Coder::kMeasuresSmallest, [](const Extremes& e, float* s) { Coder::measure(e, s); },
          decode_run<Coder, Code>, encode_run<Coder, Code, kCoding>};
}

struct CodecPasses {
  int index, wide, code_bytes;  // wide: index of the codec of wide moments
  bool root, relative;
  CoderPasses of_signed, of_unsigned;
};

template <class Codec>
constexpr CodecPasses codec_passes(int index, int wide) {
  using Code = typename Codec::Code;
  return {index,
          wide,
          sizeof(Code),
          Codec::kRoot,
          Codec::kRelative,
          coder_passes<typename Codec::Signed, Code, kSharesCodes<Codec> ? Coding::kAdded : Coding::kAlone>(),
          coder_passes<typename Codec::Unsigned, Code, Codec::kRelative ? Coding::kWithUnit : Coding::kAlone>()};
}

// The operands of a run, as floats.
struct RunFloats {
  float* param;
  float* gradient;
  float* moments[kMaxMoments];  // roots of kUnsigned moments, if the codec codes roots
};

// Updates n elements, a multiple of kEach. kRoots: the codec codes roots. kSkips: elements whose update is lost stay
// unchanged; returns their number.
template <class Rule, bool kRoots, bool kSkips>
int64_t update_run(const void* scalars, const RunFloats& run, int n) {
  using F = Floats<kEachPack>;
  using Kept = typename Rule::Kept;
  const Rule rule = *static_cast<const Rule*>(scalars);
  int64_t skipped = 0;
  for (int i = 0; i < n; i += kEach) {
    F weight = load_lanes<kEachPack>(run.param + i), old[Kept::kCount + 1], moment[Kept::kCount + 1],
      root[Kept::kCount + 1];
    const F gradient = load_lanes<kEachPack>(run.gradient + i), old_weight = weight;
#pragma GCC unroll 4
    for (int k = 0; k < Kept::kCount; ++k) {
      old[k] = load_lanes<kEachPack>(run.moments[k] + i);
      const bool is_root = kRoots && Kept::kKinds[k] == MomentKind::kUnsigned;
      moment[k] = is_root ? old[k] * old[k] : old[k];
    }
    rule.update(weight, gradient, moment, root);
    if constexpr (kSkips) {
      const auto lost = is_lost(rule, gradient, old_weight, weight, moment);
      skipped += count(lost);
      store_lanes(run.param + i, select(lost, old_weight, weight));
#pragma GCC unroll 4
      for (int k = 0; k < Kept::kCount; ++k) {
        const bool is_root = kRoots && Kept::kKinds[k] == MomentKind::kUnsigned;
        const bool is_exact = Kept::kKinds[k] == MomentKind::kExact;
        const F x = is_root ? root[Kept::root_of(k)] : moment[k];
        store_lanes(run.moments[k] + i, is_exact ? x : select(lost, old[k], x));
      }
    } else {
      store_lanes(run.param + i, weight);
#pragma GCC unroll 4
      for (int k = 0; k < Kept::kCount; ++k) {
        const bool is_root = kRoots && Kept::kKinds[k] == MomentKind::kUnsigned;
        store_lanes(run.moments[k] + i, is_root ? root[Kept::root_of(k)] : moment[k]);
      }
    }
  }
  return skipped;
}

// Computes the terms that n elements, a multiple of kEach, add to the rule's sums. Terms of lost updates are zero.
// terms: an array per sum; for sums of products, arrays of first factors, then of second factors.
template <class Rule, bool kRoots, bool kSkips>
void terms_of_run(const void* scalars, const RunFloats& run, float* const* terms, int n) {
  using F = Floats<kEachPack>;
  using Kept = typename Rule::Kept;
  const Rule rule = *static_cast<const Rule*>(scalars);
  for (int i = 0; i < n; i += kEach) {
    F moment[Kept::kCount + 1], x[kSumsOf<Rule>], y[kSumsOf<Rule>];
    const F gradient = load_lanes<kEachPack>(run.gradient + i), param = load_lanes<kEachPack>(run.param + i);
#pragma GCC unroll 4
    for (int k = 0; k < Kept::kCount; ++k) {
      moment[k] = load_lanes<kEachPack>(run.moments[k] + i);
      if (kRoots && Kept::kKinds[k] == MomentKind::kUnsigned) moment[k] = moment[k] * moment[k];
    }
    if constexpr (kHasProducts<Rule>) {
      rule.terms(param, gradient, moment, x, y);
    } else {
      rule.terms(param, gradient, moment, x);
    }
#pragma GCC unroll 2
    for (int j = 0; j < kSumsOf<Rule>; ++j) {
      if constexpr (kSkips) x[j] = select(is_lost(rule, gradient, param, x[j], moment), spread<F>(0.0f), x[j]);
      store_lanes(terms[j] + i, x[j]);
      if constexpr (kHasProducts<Rule>) store_lanes(terms[kSumsOf<Rule> + j] + i, y[j]);
    }
  }
}

constexpr size_t kRuleBytes = 64;

struct RulePasses {
  int moments, first_unsigned, sums;
  bool products;  // whether the sums add up products
  const MomentKind* kinds;
  void (*make)(void* rule, const double* hyper, float step);
  Gains (*gains)(const void* rule);
  void (*with_sums)(void* rule, const double* sums, double numel);  // nullptr for a rule without sums, or with totals
  int64_t (*update[2][2])(const void* rule, const RunFloats& run, int n);                   // [kRoots][kSkips]
  void (*terms[2][2])(const void* rule, const RunFloats& run, float* const* terms, int n);  // [kRoots][kSkips]
  // Moves parameters for the rounding error of a signed moment: `in_units` before coding and `coded` after, in units of
  // the coded root `unit`. nullptr for a rule that does not repay.
  void (*repay)(const void* rule, float* param, const float* in_units, const float* coded, const float* unit, int n);
};

template <class Rule>
void repay_run(const void* scalars, float* param, const float* in_units, const float* coded, const float* unit, int n) {
  const Rule rule = *static_cast<const Rule*>(scalars);
  for (int i = 0; i < n; i += kEach) {
    const auto root = load_lanes<kEachPack>(unit + i);
    const auto error = (load_lanes<kEachPack>(in_units + i) - load_lanes<kEachPack>(coded + i)) * root;
    store_lanes(param + i, rule.repaid(load_lanes<kEachPack>(param + i), error, root));
  }
}

// The rule's scalars. Each thread keeps the last: most kernel rows have the scalars of the row before, and making
// scalars takes longer than stepping a small kernel row.
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

template <class Rule>
constexpr RulePasses rule_passes() {
  static_assert(sizeof(Rule) <= kRuleBytes && Rule::Kept::kCount <= kMaxMoments, "raise kRuleBytes or kMaxMoments");
  RulePasses passes = {
      Rule::Kept::kCount,
      Rule::Kept::kUnsigned,
      kSumsOf<Rule>,
      kHasProducts<Rule>,
      Rule::Kept::kKinds,
      [](void* rule, const double* hyper, float step) { *static_cast<Rule*>(rule) = rule_of<Rule>(hyper, step); },
      [](const void* rule) { return gains_of(*static_cast<const Rule*>(rule)); },
      nullptr,
      {{update_run<Rule, false, false>, update_run<Rule, false, true>},
       {update_run<Rule, true, false>, update_run<Rule, true, true>}},
      {},
      nullptr};
  if constexpr (kRepaysOf<Rule>) passes.repay = repay_run<Rule>;
  if constexpr (kSumsOf<Rule> > 0) {
    static_assert(kSumsOf<Rule> <= kMaxSums, "raise kMaxSums");
    if constexpr (!kHasTotals<Rule>) {
      passes.with_sums = [](void* rule, const double* sums, double numel) {
        static_cast<Rule*>(rule)->with_sums(sums, numel);
      };
    }
    passes.terms[0][0] = terms_of_run<Rule, false, false>;
    passes.terms[0][1] = terms_of_run<Rule, false, true>;
    passes.terms[1][0] = terms_of_run<Rule, true, false>;
    passes.terms[1][1] = terms_of_run<Rule, true, true>;
  }
  return passes;
}

// Loads n gradients, and zeros up to a multiple of kEach.
template <class T, class Convert>
void load_gradient(float* to, const char* gradient, int n, Convert convert) {
  const T* from = reinterpret_cast<const T*>(gradient);
  int i = 0;
  for (; i + kFour <= n; i += kFour) {
    fetch_ahead<kFour>(from + i);
    store_lanes(to + i, convert(load_lanes<kFour / kLanes>(from + i)));
  }
  for (; i < n; i += kEach) store_lanes(to + i, convert(load_each(from + i, n - i)));
}

__attribute__((noinline)) inline void load_gradient(float* to, const char* from, DType dtype, int n) {
  switch (dtype) {
    case DType::kFloat32:
      return load_gradient<float>(to, from, n, [](auto x) { return x; });
    case DType::kBFloat16:
      return load_gradient<uint16_t>(to, from, n, [](auto x) { return float_from_bf16(x); });
    default:
      return load_gradient<uint16_t>(to, from, n, [](auto x) { return float_from_fp16(x); });
  }
}

// Multiplies n gradients, a multiple of kEach, by `scale`. Returns whether any gradient or parameter is large.
inline bool scale_gradient(const RunFloats& run, float scale, Gains gains, int n) {
  Ints<kEachPack> largest{};
  for (int i = 0; i < n; i += kEach) {
    const Floats<kEachPack> g = load_lanes<kEachPack>(run.gradient + i) * scale;
    largest = max_int(largest, largest_product(gains, g, load_lanes<kEachPack>(run.param + i)));
    store_lanes(run.gradient + i, g);
  }
  return any(largest >= kLargeBits);
}

// Calls take(format) with a type whose `value` is the format.
template <class Take>
SHARDOPT_HD void with_format(WeightFormat format, Take take) {
  switch (format) {
    case WeightFormat::kFloat32:
      return take(std::integral_constant<WeightFormat, WeightFormat::kFloat32>{});
    case WeightFormat::kBFloat16:
      return take(std::integral_constant<WeightFormat, WeightFormat::kBFloat16>{});
    case WeightFormat::kFloat16:
      return take(std::integral_constant<WeightFormat, WeightFormat::kFloat16>{});
    case WeightFormat::kBFloat16Plus8:
      return take(std::integral_constant<WeightFormat, WeightFormat::kBFloat16Plus8>{});
    case WeightFormat::kBFloat16Plus16:
      return take(std::integral_constant<WeightFormat, WeightFormat::kBFloat16Plus16>{});
    case WeightFormat::kBFloat16Stochastic:
      return take(std::integral_constant<WeightFormat, WeightFormat::kBFloat16Stochastic>{});
    case WeightFormat::kFloat16Plus8:
      return take(std::integral_constant<WeightFormat, WeightFormat::kFloat16Plus8>{});
    case WeightFormat::kFloat16Plus16:
      return take(std::integral_constant<WeightFormat, WeightFormat::kFloat16Plus16>{});
  }
}

// Calls take(weights, i) for every kEach elements of a run; `weights` always has room for kEach.
template <WeightFormat kFormat, bool kStores, class Take>
SHARDOPT_HD void each_of(const Weights& weights, int n, Take take) {
  const int whole = n / kEach * kEach;
#pragma GCC unroll 4
  for (int i = 0; i < whole; i += kEach) take(weights, i);
  if (whole == n) return;
  char words[4 * kEach] = {}, low_bits[2 * kEach] = {};
  const uint64_t done = static_cast<uint64_t>(whole), left = static_cast<uint64_t>(n - whole);
  constexpr uint64_t word = bytes_of(kFormat), low = low_bytes_of(kFormat);
  copy_bytes(words, weights.words + word * done, word * left);
  if (low) copy_bytes(low_bits, weights.low_bits + low * done, low * left);
  take(Weights{words - word * done, low_bits - low * done, weights.noise}, whole);
  if (!kStores) return;
  copy_bytes(weights.words + word * done, words, word * left);
  if (low) copy_bytes(weights.low_bits + low * done, low_bits, low * left);
}

__attribute__((noinline)) inline void load_weights(float* to, const Weights& weights, WeightFormat format, int n) {
  with_format(format, [&](auto known) {
    constexpr WeightFormat kFormat = decltype(known)::value;
    each_of<kFormat, false>(weights, n, [to](const Weights& w, int i) __attribute__((always_inline)) {
      fetch_ahead<kEach>(reinterpret_cast<const uint16_t*>(w.words) + i);
      store_lanes(to + i, w.load<kEachPack>(kFormat, i));
    });
  });
}

__attribute__((noinline)) inline void store_weights(const Weights& weights, const float* from, WeightFormat format,
                                                    int n) {
  with_format(format, [&](auto known) {
    constexpr WeightFormat kFormat = decltype(known)::value;
    each_of<kFormat, true>(weights, n, [from](const Weights& w, int i) __attribute__((always_inline)) {
      w.store(load_lanes<kEachPack>(from + i), kFormat, i);
    });
  });
}

// Multiplies n elements of `to`, a multiple of kEach, by those of `by`.
inline void multiply(float* to, const float* by, int n) {
  for (int i = 0; i < n; i += kEach) {
    store_lanes(to + i, load_lanes<kEachPack>(to + i) * load_lanes<kEachPack>(by + i));
  }
}

// Divides `to` by `unit`; zero where the root is zero.
inline void divide_by_unit(float* to, const float* root, const float* unit, int n) {
  for (int i = 0; i < n; i += kEach) {
    const auto in_units = load_lanes<kEachPack>(to + i) * reciprocal(load_lanes<kEachPack>(unit + i));
    store_lanes(to + i, select(bits(load_lanes<kEachPack>(root + i)) == 0, Floats<kEachPack>{}, in_units));
  }
}

template <class Add>
SHARDOPT_HD Extremes extremes_of(const float* from, int n, Add add) {
  LaneExtremes extremes = LaneExtremes::none();
  for (int i = 0; i < n; i += kEach) add(extremes, load_each(from + i, n - i));
  return extremes.over_lanes();
}

// The extremes of a block of n elements.
inline Extremes extremes_of(const float* from, int n, bool is_signed, bool smallest) {
  using F = Floats<kEachPack>;
  if (is_signed) return extremes_of(from, n, [](LaneExtremes& e, F x) { e.add_signed(x); });
  if (smallest) return extremes_of(from, n, [](LaneExtremes& e, F x) { e.template add_unsigned<true>(x); });
  return extremes_of(from, n, [](LaneExtremes& e, F x) { e.template add_unsigned<false>(x); });
}

SHARDOPT_END_NAMESPACE
