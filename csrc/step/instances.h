// Every rule and every codec that is built. To add one, include its header and put its name in a list.
#pragma once

#include <type_traits>

#include "codecs/companded16.h"
#include "codecs/companded8.h"
#include "codecs/dynamic8.h"
#include "codecs/log4.h"
#include "codecs/log8.h"
#include "codecs/plain.h"
#include "rules/adagrad.h"
#include "rules/adam.h"
#include "rules/adamax.h"
#include "rules/adan.h"
#include "rules/ademamix.h"
#include "rules/adopt.h"
#include "rules/amsgrad.h"
#include "rules/cautious.h"
#include "rules/lamb.h"
#include "rules/lars.h"
#include "rules/lion.h"
#include "rules/muon.h"
#include "rules/nadam.h"
#include "rules/prodigy.h"
#include "rules/radam.h"
#include "rules/repaid.h"
#include "rules/rmsprop.h"
#include "rules/sgd.h"
#include "rules/stable_adamw.h"

SHARDOPT_BEGIN_NAMESPACE

template <class... Types>
struct List {
  static constexpr int kCount = sizeof...(Types);
};

// Rules and codecs that are compiled together into kernels of their own: these kernels are the fastest, but each pair
// takes the compiler seconds per instruction set.
using UsualRules = List<Adam, Lion, Momentum>;
using UsualCodecs = List<Float32, BFloat16, Log8, Companded8, Dynamic8>;

using OtherRules =
    List<Sgd, Amsgrad, NAdam, RAdam, Adamax, AdEMAMix, Adopt, Adan, Adagrad, MuonDirection, MuonApply,
         RmsProp<false, false>, RmsProp<false, true>, RmsProp<true, false>, RmsProp<true, true>, RepaidAdam>;
// Rules with kSums.
using SumRules = List<Lamb, Lars, StableAdamW, Cautious<Adam>, Cautious<Lion>, Prodigy>;
using OtherCodecs = List<Companded16>;
// Codecs in which two moments share a code, and the rules that may have them.
using SharedCodecs = List<Log4>;
using SharingRules = List<Adam, RepaidAdam>;

template <class... First, class... Second>
List<First..., Second...> joined(List<First...>, List<Second...>);

using Rules = decltype(joined(joined(UsualRules{}, OtherRules{}), SumRules{}));
using UnsharedCodecs = decltype(joined(UsualCodecs{}, OtherCodecs{}));
using Codecs = decltype(joined(UnsharedCodecs{}, SharedCodecs{}));

// The codec of wide moments in a state of a codec.
template <class Codec>
using WideCodec = std::conditional_t<(Codec::Signed::kScales > 0), Companded16, Float32>;

// The index of a type in a list; the list's length if the type is not in it.
template <class T, class... Types>
constexpr int index_of(List<Types...>) {
  int index = 0, found = sizeof...(Types);
  ((std::is_same_v<T, Types> ? void(found = index) : void(), ++index), ...);
  return found;
}

// A codec's number in a kernel's table.
template <class Codec>
constexpr int kCodecIndex = index_of<Codec>(Codecs{});

template <class Rule>
constexpr bool may_share_codes() {
  return index_of<Rule>(SharingRules{}) < SharingRules::kCount;
}

template <class Rule, class Codec>
constexpr bool is_usual() {
  return index_of<Rule>(UsualRules{}) < UsualRules::kCount && index_of<Codec>(UsualCodecs{}) < UsualCodecs::kCount;
}

// Tests on a CPU compile the CUDA kernels with SHARDOPT_FEW_KERNELS: half of them, in half of the time.
#if defined(SHARDOPT_FEW_KERNELS)
constexpr bool kFewKernels = true;
#else
constexpr bool kFewKernels = false;
#endif

// Whether a rule, a codec and a weight format (an index in kAlignedFormats) have a CUDA kernel of their own. Of few
// kernels these are all formats of Adam and log8, and each two of rule, codec and format once.
template <class Rule, class Codec>
constexpr bool has_cuda_kernel(int format) {
  constexpr int pair = index_of<Rule>(UsualRules{}) + kCodecIndex<Codec> - kCodecIndex<Log8>;
  return Codec::Signed::kScales > 0 && is_usual<Rule, Codec>() &&
         (!kFewKernels || pair == 0 || (pair + format) % 3 == 0);
}

// Further pairs with kernels of their own on the CPU, where stepping run by run costs more than on a GPU.
template <class Rule, class Codec>
constexpr bool is_usual_on_cpu() {
  return (std::is_same_v<Rule, RepaidAdam> && std::is_same_v<Codec, Log8>) ||
         (may_share_codes<Rule>() && kSharesCodes<Codec>);
}

SHARDOPT_END_NAMESPACE
