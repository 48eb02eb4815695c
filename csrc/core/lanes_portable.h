// One native vector where nothing is known of the processor: 4 lanes, element by element where the compiler's generic
// vectors have no operation.
#pragma once

#include "core/native.h"

SHARDOPT_BEGIN_NAMESPACE
namespace native {

SHARDOPT_HD int count(Mask m) {
  int total = 0;
  for (int i = 0; i < kLanes; ++i) total -= m[i];
  return total;
}
SHARDOPT_HD bool any(Mask m) { return count(m) != 0; }

SHARDOPT_HD Floats select(Mask m, Floats yes, Floats no) { return m ? yes : no; }
SHARDOPT_HD Ints select(Mask m, Ints yes, Ints no) { return m ? yes : no; }

SHARDOPT_HD Floats fma(Floats a, Floats b, Floats c) {
  for (int i = 0; i < kLanes; ++i) a[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return a;
}
SHARDOPT_HD Floats square_root(Floats a) {
  for (int i = 0; i < kLanes; ++i) a[i] = __builtin_sqrtf(a[i]);
  return a;
}
SHARDOPT_HD Ints max_int(Ints a, Ints b) { return a > b ? a : b; }
SHARDOPT_HD Ints min_int(Ints a, Ints b) { return a < b ? a : b; }
SHARDOPT_HD UnsignedInts max_int(UnsignedInts a, UnsignedInts b) { return a > b ? a : b; }
SHARDOPT_HD Halves max_int(Halves a, Halves b) { return a > b ? a : b; }
SHARDOPT_HD UnsignedInts min_int(UnsignedInts a, UnsignedInts b) { return a < b ? a : b; }

SHARDOPT_HD uint32_t largest(UnsignedInts a) {
  uint32_t y = a[0];
  for (int i = 1; i < kLanes; ++i) y = a[i] > y ? a[i] : y;
  return y;
}
SHARDOPT_HD uint32_t smallest(UnsignedInts a) {
  uint32_t y = a[0];
  for (int i = 1; i < kLanes; ++i) y = a[i] < y ? a[i] : y;
  return y;
}

template <class T>
SHARDOPT_HD Ints load(const T* from) {
  Ints a{};
  for (int i = 0; i < kLanes; ++i) a[i] = from[i];
  return a;
}
template <class T>
SHARDOPT_HD void store(T* to, Ints a) {
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<T>(a[i]);
}

template <int kSize>
SHARDOPT_HD Floats lookup(const float* table, Ints index) {
  Floats found{};
  for (int i = 0; i < kLanes; ++i) found[i] = table[kSize == 8 ? index[i] & 7 : index[i]];
  return found;
}

}  // namespace native
SHARDOPT_END_NAMESPACE
