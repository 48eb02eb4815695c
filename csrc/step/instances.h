// Every rule and every codec that is built. A new one is its header and its name in the list.
#pragma once

#include "codecs/companded8.h"
#include "codecs/dynamic8.h"
#include "codecs/log8.h"
#include "codecs/plain.h"
#include "rules/adam.h"
#include "rules/lion.h"
#include "rules/sgd.h"

SHARDOPT_BEGIN_NAMESPACE

template <class... Types>
struct List {
  static constexpr int kCount = sizeof...(Types);
};

using Rules = List<Adam, Lion, Momentum, Sgd>;
using Codecs = List<Float32, BFloat16, Log8, Companded8, Dynamic8>;

SHARDOPT_END_NAMESPACE
