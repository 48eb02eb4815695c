// One native vector of AArch64's NEON: 4 lanes.
#pragma once

#include <arm_neon.h>

#include "core/native.h"

SHARDOPT_BEGIN_NAMESPACE
namespace native {

SHARDOPT_HD bool any(Mask m) { return vmaxvq_u32((uint32x4_t)m) != 0; }
SHARDOPT_HD int count(Mask m) { return -vaddvq_s32((int32x4_t)m); }

SHARDOPT_HD Floats select(Mask m, Floats yes, Floats no) {
  return (Floats)vbslq_f32((uint32x4_t)m, (float32x4_t)yes, (float32x4_t)no);
}
SHARDOPT_HD Ints select(Mask m, Ints yes, Ints no) {
  return (Ints)vbslq_s32((uint32x4_t)m, (int32x4_t)yes, (int32x4_t)no);
}

SHARDOPT_HD Floats fma(Floats a, Floats b, Floats c) {
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
SHARDOPT_HD Floats square_root(Floats a) { return (Floats)vsqrtq_f32((float32x4_t)a); }
SHARDOPT_HD Ints max_int(Ints a, Ints b) { return (Ints)vmaxq_s32((int32x4_t)a, (int32x4_t)b); }
SHARDOPT_HD Ints min_int(Ints a, Ints b) { return (Ints)vminq_s32((int32x4_t)a, (int32x4_t)b); }
SHARDOPT_HD UnsignedInts max_int(UnsignedInts a, UnsignedInts b) {
  return (UnsignedInts)vmaxq_u32((uint32x4_t)a, (uint32x4_t)b);
}
SHARDOPT_HD Halves max_int(Halves a, Halves b) { return (Halves)vmaxq_u16((uint16x8_t)a, (uint16x8_t)b); }
SHARDOPT_HD UnsignedInts min_int(UnsignedInts a, UnsignedInts b) {
  return (UnsignedInts)vminq_u32((uint32x4_t)a, (uint32x4_t)b);
}

SHARDOPT_HD uint32_t largest(UnsignedInts a) { return vmaxvq_u32((uint32x4_t)a); }
SHARDOPT_HD uint32_t smallest(UnsignedInts a) { return vminvq_u32((uint32x4_t)a); }

SHARDOPT_HD Ints load(const uint16_t* from) { return (Ints)vmovl_u16(vld1_u16(from)); }
SHARDOPT_HD Ints load(const int16_t* from) { return (Ints)vmovl_s16(vld1_s16(from)); }
SHARDOPT_HD Ints load(const uint8_t* from) {
  uint32_t four;
  __builtin_memcpy(&four, from, sizeof four);
  return (Ints)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}
SHARDOPT_HD Ints load(const int8_t* from) {
  uint32_t four;
  __builtin_memcpy(&four, from, sizeof four);
  return (Ints)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four))));
}
SHARDOPT_HD void store(uint16_t* to, Ints a) { vst1_u16(to, vmovn_u32((uint32x4_t)a)); }
SHARDOPT_HD void store(uint8_t* to, Ints a) {
  const uint16x4_t halves = vmovn_u32((uint32x4_t)a);
  const uint32_t four = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(halves, halves))), 0);
  __builtin_memcpy(to, &four, sizeof four);
}

template <int kSize>
SHARDOPT_HD Floats lookup(const float* table, Ints index) {
  if constexpr (kSize == 8) index &= 7;
  return Floats{table[index[0]], table[index[1]], table[index[2]], table[index[3]]};
}

}  // namespace native
SHARDOPT_END_NAMESPACE
