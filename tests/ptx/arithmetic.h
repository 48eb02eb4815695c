// Handlers of instructions that compute, once per type.
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>

#include "machine.h"

namespace ptx {

// Registers hold numbers of up to 32 bits in u32, wider ones in u64.
template <class T>
using Bits = std::conditional_t<sizeof(T) == 8, u64, u32>;

template <class T>
T number_of(Bits<T> bits) {
  if constexpr (std::is_same_v<T, float>)
    return float_of(bits);
  else if constexpr (std::is_same_v<T, double>)
    return double_of(bits);
  else
    return static_cast<T>(bits);
}
template <class T>
Bits<T> bits_from(T x) {
  if constexpr (std::is_floating_point_v<T>)
    return bits_of(x);
  else
    return static_cast<std::make_unsigned_t<T>>(x);
}

template <class T>
const Bits<T>* read(const Warp& w, const Operand& o) {
  if constexpr (sizeof(T) == 8)
    return w.read64(o);
  else
    return w.read32(o);
}
template <class T>
Bits<T>* write(Warp& w, const Operand& o) {
  if constexpr (sizeof(T) == 8)
    return w.write64(o);
  else
    return w.write32(o);
}

// D: the type of the result; A, B, C: of the operands. F is called with them.
template <class D, class A, class F>
Handler unary(F) {
  return [](Warp& w, const Instruction& i, u32 mask) {
    const auto* a = read<A>(w, i.from[0]);
    auto* to = write<D>(w, i.to[0]);
    for_lanes(mask, [&](int l) { to[l] = bits_from(static_cast<D>(F{}(number_of<A>(a[l])))); });
  };
}
template <class D, class A, class B, class F>
Handler binary(F) {
  return [](Warp& w, const Instruction& i, u32 mask) {
    const auto* a = read<A>(w, i.from[0]);
    const auto* b = read<B>(w, i.from[1]);
    auto* to = write<D>(w, i.to[0]);
    for_lanes(mask, [&](int l) { to[l] = bits_from(static_cast<D>(F{}(number_of<A>(a[l]), number_of<B>(b[l])))); });
  };
}
template <class D, class A, class B, class C, class F>
Handler ternary(F) {
  return [](Warp& w, const Instruction& i, u32 mask) {
    const auto* a = read<A>(w, i.from[0]);
    const auto* b = read<B>(w, i.from[1]);
    const auto* c = read<C>(w, i.from[2]);
    auto* to = write<D>(w, i.to[0]);
    for_lanes(mask, [&](int l) {
      to[l] = bits_from(static_cast<D>(F{}(number_of<A>(a[l]), number_of<B>(b[l]), number_of<C>(c[l]))));
    });
  };
}

template <class T, class F>
Handler compare(F) {
  return [](Warp& w, const Instruction& i, u32 mask) {
    const auto* a = read<T>(w, i.from[0]);
    const auto* b = read<T>(w, i.from[1]);
    u32 found = 0;
    for (int l = 0; l < kWarp; ++l) found |= static_cast<u32>(F{}(number_of<T>(a[l]), number_of<T>(b[l]))) << l;
    w.set_predicate(i.to[0], found, mask);
  };
}
template <class T>
Handler comparison(const std::string& how) {
  if (how == "eq") return compare<T>([](T a, T b) { return a == b; });
  if (how == "lt" || how == "lo") return compare<T>([](T a, T b) { return a < b; });
  if (how == "le" || how == "ls") return compare<T>([](T a, T b) { return a <= b; });
  if (how == "gt" || how == "hi") return compare<T>([](T a, T b) { return a > b; });
  if (how == "ge" || how == "hs") return compare<T>([](T a, T b) { return a >= b; });
  if (how == "ne") return compare<T>([](T a, T b) { return a < b || a > b; });
  if constexpr (std::is_floating_point_v<T>) {  // with a NaN these hold
    if (how == "neu") return compare<T>([](T a, T b) { return !(a == b); });
    if (how == "ltu") return compare<T>([](T a, T b) { return !(a >= b); });
    if (how == "leu") return compare<T>([](T a, T b) { return !(a > b); });
    if (how == "gtu") return compare<T>([](T a, T b) { return !(a <= b); });
    if (how == "geu") return compare<T>([](T a, T b) { return !(a < b); });
    if (how == "nan") return compare<T>([](T a, T b) { return a != a || b != b; });
    if (how == "num") return compare<T>([](T a, T b) { return a == a && b == b; });
  }
  return nullptr;
}

template <class T>
Handler division(bool remainder) {
  // With the results of the device where there is none: all ones, the dividend.
  if (remainder)
    return binary<T, T, T>([](T a, T b) {
      return static_cast<T>(b == 0 ? a : std::is_signed_v<T> && b == static_cast<T>(-1) ? T{0} : a % b);
    });
  return binary<T, T, T>([](T a, T b) {
    return static_cast<T>(b == 0                                           ? static_cast<T>(-1)
                          : std::is_signed_v<T> && b == static_cast<T>(-1) ? static_cast<T>(0 - static_cast<u64>(a))
                                                                           : a / b);
  });
}

template <class T>
Handler integer(const std::string& op) {
  if (op == "add") return binary<T, T, T>([](T a, T b) { return static_cast<u64>(a) + static_cast<u64>(b); });
  if (op == "sub") return binary<T, T, T>([](T a, T b) { return static_cast<u64>(a) - static_cast<u64>(b); });
  if (op == "mul.lo") return binary<T, T, T>([](T a, T b) { return static_cast<u64>(a) * static_cast<u64>(b); });
  if (op == "mad.lo")
    return ternary<T, T, T, T>(
        [](T a, T b, T c) { return static_cast<u64>(a) * static_cast<u64>(b) + static_cast<u64>(c); });
  if (op == "mul.hi")
    return binary<T, T, T>([](T a, T b) {
      using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
      return static_cast<Wide>(a) * static_cast<Wide>(b) >> (8 * sizeof(T));
    });
  if (op == "min") return binary<T, T, T>([](T a, T b) { return a < b ? a : b; });
  if (op == "max") return binary<T, T, T>([](T a, T b) { return a > b ? a : b; });
  if (op == "neg") return unary<T, T>([](T a) { return 0 - static_cast<u64>(a); });
  if (op == "abs") return unary<T, T>([](T a) { return a < 0 ? 0 - static_cast<u64>(a) : static_cast<u64>(a); });
  if (op == "div" || op == "rem") return division<T>(op == "rem");
  return nullptr;
}

// Bits of any size in registers of any.
template <class T>
Handler bitwise(const std::string& op) {
  if (op == "and") return binary<T, T, T>([](T a, T b) { return a & b; });
  if (op == "or") return binary<T, T, T>([](T a, T b) { return a | b; });
  if (op == "xor") return binary<T, T, T>([](T a, T b) { return a ^ b; });
  if (op == "not") return unary<T, T>([](T a) { return ~a; });
  if (op == "mov") return unary<T, T>([](T a) { return a; });
  return nullptr;
}

// Shifts by as many bits as there are, or more, leave zeros, or signs.
template <class T>
Handler shift(bool left) {
  constexpr u32 kBits = 8 * sizeof(T);
  if (left)
    return binary<T, T, u32>([](T a, u32 n) { return n >= kBits ? T{0} : static_cast<T>(static_cast<u64>(a) << n); });
  return binary<T, T, u32>([](T a, u32 n) {
    if (n >= kBits) return static_cast<T>(a < 0 ? -1 : 0);
    return static_cast<T>(a >> n);
  });
}

// IEEE 754-2019's minimumNumber and maximumNumber, with -0 below +0.
template <class T>
T lesser(T a, T b) {
  if (a != a) return b;
  if (b != b) return a;
  return a == b ? (std::signbit(a) ? a : b) : (a < b ? a : b);
}
template <class T>
T greater(T a, T b) {
  if (a != a) return b;
  if (b != b) return a;
  return a == b ? (std::signbit(a) ? b : a) : (a > b ? a : b);
}

// Rounded to nearest, ties to even, without flushing: as this file is compiled, without contraction.
template <class T>
Handler floating(const std::string& op) {
  if (op == "add.rn") return binary<T, T, T>([](T a, T b) { return a + b; });
  if (op == "sub.rn") return binary<T, T, T>([](T a, T b) { return a - b; });
  if (op == "mul.rn") return binary<T, T, T>([](T a, T b) { return a * b; });
  if (op == "div.rn") return binary<T, T, T>([](T a, T b) { return a / b; });
  if (op == "fma.rn") return ternary<T, T, T, T>([](T a, T b, T c) { return std::fma(a, b, c); });
  if (op == "rcp.rn") return unary<T, T>([](T a) { return 1 / a; });
  if (op == "sqrt.rn") return unary<T, T>([](T a) { return std::sqrt(a); });
  if (op == "min") return binary<T, T, T>([](T a, T b) { return lesser(a, b); });
  if (op == "max") return binary<T, T, T>([](T a, T b) { return greater(a, b); });
  if (op == "max.NaN") return binary<T, T, T>([](T a, T b) { return a != a ? a : b != b ? b : greater(a, b); });
  using B = Bits<T>;
  constexpr B kSign = B{1} << (8 * sizeof(T) - 1);
  if (op == "abs") return unary<B, B>([](B a) { return a & ~kSign; });
  if (op == "neg") return unary<B, B>([](B a) { return a ^ kSign; });
  return nullptr;
}

// A float, rounded towards zero, saturated; NaN becomes 0, or as 64 bits the sign bit alone.
template <class I, class T>
Handler to_integer() {
  return unary<I, T>([](T x) {
    if (x != x) return sizeof(I) == 8 ? static_cast<I>(u64{1} << 63) : I{0};
    const long double t = std::trunc(static_cast<long double>(x));
    if (t <= static_cast<long double>(std::numeric_limits<I>::min())) return std::numeric_limits<I>::min();
    if (t >= static_cast<long double>(std::numeric_limits<I>::max())) return std::numeric_limits<I>::max();
    return static_cast<I>(t);
  });
}

inline u32 bfloat16_of(u32 bits) {
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

template <class T>
T inserted_field(T field, T into, u32 at, u32 length) {
  constexpr u32 kBits = 8 * sizeof(T);
  at &= 0xff, length &= 0xff;
  if (at >= kBits) return into;
  const T mask = static_cast<T>((length >= kBits ? ~T{0} : static_cast<T>((T{1} << length) - 1)) << at);
  return (into & ~mask) | (static_cast<T>(field << at) & mask);
}

inline u32 extracted_field(u32 a, u32 at, u32 length) {
  at &= 0xff, length &= 0xff;
  if (at > 31) return 0;
  return a >> at & (length > 31 ? ~0u : (1u << length) - 1);
}

// prmt: each nibble of the selector chooses a byte, and with its highest bit the byte's sign, eight times.
inline u32 permuted(u32 a, u32 b, u32 selector) {
  const u64 all = static_cast<u64>(b) << 32 | a;
  u32 found = 0;
  for (int k = 0; k < 4; ++k) {
    const u32 nibble = selector >> (4 * k) & 15;
    u32 byte = static_cast<u32>(all >> (8 * (nibble & 7))) & 0xff;
    if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
    found |= byte << (8 * k);
  }
  return found;
}

}  // namespace ptx
