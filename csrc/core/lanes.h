// The CPU's vectors of floats and what rules and codecs do with them. A number here is a pack of several native vectors
// that take each operation together, so that the processor has independent work while one waits for a quotient or a
// root. Operations that the compiler's generic vectors do badly or not at all are written per instruction set.
#pragma once

#include "core/target.h"

#if defined(__AVX512F__)
#include "core/lanes_avx512.h"
#elif defined(__AVX2__)
#include "core/lanes_avx2.h"
#elif defined(SHARDOPT_NEON)
#include "core/lanes_neon.h"
#else
#include "core/lanes_portable.h"
#endif

SHARDOPT_BEGIN_NAMESPACE

template <int kPack>
struct Floats;
template <int kPack>
struct Ints;

#define SHARDOPT_EACH _Pragma("GCC unroll 8") for (int i = 0; i < kPack; ++i)

// Mask of the elements for which a comparison holds.
template <int kPack>
struct Mask {
  native::Mask x[kPack];
};

#define SHARDOPT_OPERATOR(Type, op)                     \
  friend SHARDOPT_HD Type operator op(Type a, Type b) { \
    SHARDOPT_EACH a.x[i] = a.x[i] op b.x[i];            \
    return a;                                           \
  }
#define SHARDOPT_COMPARISON(Type, op, name)                    \
  friend SHARDOPT_HD Mask<kPack> operator op(Type a, Type b) { \
    Mask<kPack> m;                                             \
    SHARDOPT_EACH m.x[i] = native::name(a.x[i], b.x[i]);       \
    return m;                                                  \
  }

template <int kPack>
struct UnsignedInts {
  native::UnsignedInts x[kPack];

  UnsignedInts() = default;
  SHARDOPT_HD UnsignedInts(uint32_t value) { SHARDOPT_EACH x[i] = native::UnsignedInts{} + value; }

  SHARDOPT_OPERATOR(UnsignedInts, +)
  SHARDOPT_OPERATOR(UnsignedInts, *)
  SHARDOPT_OPERATOR(UnsignedInts, ^)
  SHARDOPT_OPERATOR(UnsignedInts, &)
  friend SHARDOPT_HD UnsignedInts operator<<(UnsignedInts a, int by) {
    SHARDOPT_EACH a.x[i] = a.x[i] << by;
    return a;
  }
  friend SHARDOPT_HD UnsignedInts operator>>(UnsignedInts a, int by) {
    SHARDOPT_EACH a.x[i] = a.x[i] >> by;
    return a;
  }
};

template <int kPack>
struct Ints {
  native::Ints x[kPack];

  Ints() = default;
  SHARDOPT_HD Ints(int32_t value) { SHARDOPT_EACH x[i] = native::Ints{} + value; }
  SHARDOPT_HD explicit Ints(native::Ints value) { SHARDOPT_EACH x[i] = value; }

  SHARDOPT_OPERATOR(Ints, +)
  SHARDOPT_OPERATOR(Ints, -)
  SHARDOPT_OPERATOR(Ints, *)
  SHARDOPT_OPERATOR(Ints, &)
  SHARDOPT_OPERATOR(Ints, |)
  SHARDOPT_OPERATOR(Ints, ^)
  SHARDOPT_COMPARISON(Ints, ==, equal)
  SHARDOPT_COMPARISON(Ints, >, greater)
  SHARDOPT_COMPARISON(Ints, >=, at_least)
  SHARDOPT_COMPARISON(Ints, <, less)
  friend SHARDOPT_HD Ints operator-(Ints a) { return Ints{} - a; }
  friend SHARDOPT_HD Ints operator<<(Ints a, int by) {
    SHARDOPT_EACH a.x[i] = a.x[i] << by;
    return a;
  }
  friend SHARDOPT_HD Ints operator>>(Ints a, int by) {
    SHARDOPT_EACH a.x[i] = a.x[i] >> by;
    return a;
  }
};

template <int kPack>
struct Floats {
  native::Floats x[kPack];

  Floats() = default;
  SHARDOPT_HD Floats(float value) {
    SHARDOPT_EACH x[i] = value - native::Floats{};  // not 0 + value: -0 would lose its sign
  }

  SHARDOPT_OPERATOR(Floats, +)
  SHARDOPT_OPERATOR(Floats, -)
  SHARDOPT_OPERATOR(Floats, *)
  SHARDOPT_OPERATOR(Floats, /)
  SHARDOPT_COMPARISON(Floats, >, greater)
  SHARDOPT_COMPARISON(Floats, <, less)
  SHARDOPT_COMPARISON(Floats, !=, not_equal)
  friend SHARDOPT_HD Floats operator-(Floats a) {
    SHARDOPT_EACH a.x[i] = -a.x[i];
    return a;
  }
};

#undef SHARDOPT_OPERATOR
#undef SHARDOPT_COMPARISON

// A function of packs, made of the native vectors' function of that name.
#define SHARDOPT_LIFT1(To, name, From)           \
  template <int kPack>                           \
  SHARDOPT_HD To<kPack> name(From<kPack> a) {    \
    To<kPack> r;                                 \
    SHARDOPT_EACH r.x[i] = native::name(a.x[i]); \
    return r;                                    \
  }
#define SHARDOPT_LIFT2(Type, name)                             \
  template <int kPack>                                         \
  SHARDOPT_HD Type<kPack> name(Type<kPack> a, Type<kPack> b) { \
    SHARDOPT_EACH a.x[i] = native::name(a.x[i], b.x[i]);       \
    return a;                                                  \
  }
#define SHARDOPT_LIFT_SELECT(Type)                                                 \
  template <int kPack>                                                             \
  SHARDOPT_HD Type<kPack> select(Mask<kPack> m, Type<kPack> yes, Type<kPack> no) { \
    SHARDOPT_EACH no.x[i] = native::select(m.x[i], yes.x[i], no.x[i]);             \
    return no;                                                                     \
  }

SHARDOPT_LIFT1(Ints, bits, Floats)
SHARDOPT_LIFT1(Floats, float_from_bits, Ints)
SHARDOPT_LIFT1(Floats, to_float, Ints)
SHARDOPT_LIFT1(UnsignedInts, as_unsigned, Ints)
SHARDOPT_LIFT1(Ints, as_signed, UnsignedInts)
SHARDOPT_LIFT1(Floats, square_root, Floats)
SHARDOPT_LIFT2(Ints, max_int)
SHARDOPT_LIFT2(Ints, min_int)
SHARDOPT_LIFT_SELECT(Floats)
SHARDOPT_LIFT_SELECT(Ints)

#undef SHARDOPT_LIFT1
#undef SHARDOPT_LIFT2
#undef SHARDOPT_LIFT_SELECT

template <int kPack>
SHARDOPT_HD Floats<kPack> fma(Floats<kPack> a, Floats<kPack> b, Floats<kPack> c) {
  SHARDOPT_EACH a.x[i] = native::fma(a.x[i], b.x[i], c.x[i]);
  return a;
}
template <int kPack>
SHARDOPT_HD Floats<kPack> fma(float a, Floats<kPack> b, Floats<kPack> c) {
  return fma(Floats<kPack>(a), b, c);
}
template <int kPack>
SHARDOPT_HD Floats<kPack> fma(Floats<kPack> a, float b, float c) {
  return fma(a, Floats<kPack>(b), Floats<kPack>(c));
}
template <int kPack>
SHARDOPT_HD Floats<kPack> fma(float a, Floats<kPack> b, float c) {
  return fma(Floats<kPack>(a), b, Floats<kPack>(c));
}

template <int kPack>
SHARDOPT_HD Floats<kPack> reciprocal(Floats<kPack> a) {
  return Floats<kPack>(1.0f) / a;
}

template <int kSize, int kPack>
SHARDOPT_HD Floats<kPack> lookup(const float* table, Ints<kPack> index) {
  Floats<kPack> r;
  SHARDOPT_EACH r.x[i] = native::lookup<kSize>(table, index.x[i]);
  return r;
}

template <int kPack>
SHARDOPT_HD int count(Mask<kPack> m) {
  int total = 0;
  SHARDOPT_EACH total += native::count(m.x[i]);
  return total;
}
template <int kPack>
SHARDOPT_HD bool any(Mask<kPack> m) {
  native::Mask found = m.x[0];
  for (int i = 1; i < kPack; ++i) found = found | m.x[i];
  return native::any(found);
}

// 0, 1, 2, ...
template <int kPack>
SHARDOPT_HD Ints<kPack> lane_index() {
  Ints<kPack> r;
  SHARDOPT_EACH r.x[i] = native::kLaneIndex + i * kLanes;
  return r;
}

// Loads and stores kPack * kLanes integers or floats.
template <int kPack, class T>
SHARDOPT_HD auto load_lanes(const T* from) {
  Ints<kPack> r;
  SHARDOPT_EACH r.x[i] = native::load(from + i * kLanes);
  return r;
}
template <int kPack>
SHARDOPT_HD auto load_lanes(const float* from) {
  Floats<kPack> r;
  SHARDOPT_EACH __builtin_memcpy(&r.x[i], from + i * kLanes, sizeof r.x[i]);
  return r;
}
template <int kPack, class T>
SHARDOPT_HD void store_lanes(T* to, Ints<kPack> a) {
  SHARDOPT_EACH native::store(to + i * kLanes, a.x[i]);
}
template <int kPack>
SHARDOPT_HD void store_lanes(float* to, Floats<kPack> a) {
  SHARDOPT_EACH __builtin_memcpy(to + i * kLanes, &a.x[i], sizeof a.x[i]);
}

SHARDOPT_END_NAMESPACE
