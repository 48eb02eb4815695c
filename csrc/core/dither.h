// Random bits with which coders choose one of the two codes around a number, so that averages keep their level.
//
// The bits are a linear function of the element's index in the flattened global parameter, whose slope and offset are
// hashes of the step count, and of nothing else: any sharding, device and resumed run draws alike. The bits of any two
// elements are independent over steps.
#pragma once

#include "core/call.h"
#include "core/numeric.h"

SHARDOPT_BEGIN_NAMESPACE

// The index in the flattened global parameter of the element at a row and column of a kernel row.
SHARDOPT_HD int64_t global_element(const KernelRow& kernel_row, int64_t row, int64_t col) {
  return kernel_row.first_element + row * kernel_row.global_row_numel + col;
}

// The finalizer of splitmix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", 2014).
SHARDOPT_HD uint64_t mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

struct Dither {
  uint32_t offset = 0, slope = 0;

  Dither() = default;
  SHARDOPT_HD explicit Dither(float step) {
    const uint64_t mixed = mix64(static_cast<uint64_t>(step));
    offset = static_cast<uint32_t>(mixed);
    slope = static_cast<uint32_t>(mixed >> 32);
  }

  // The bits of elements counted from another one.
  SHARDOPT_HD Dither from(int64_t element) const {
    Dither moved = *this;
    moved.offset += static_cast<uint32_t>(element) * slope;
    return moved;
  }

  template <class I>
  SHARDOPT_HD I bits_at(I index) const {
    return as_signed(as_unsigned(index) * slope + offset);
  }
};

SHARDOPT_END_NAMESPACE
