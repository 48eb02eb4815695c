// Passes over gradients on the CPU, compiled once per instruction set (norm/cpu_<target>.cpp).
#pragma once

#include "step/cpu_call.h"
#include "step/cpu_sums.h"

SHARDOPT_BEGIN_NAMESPACE
namespace {

using Pack = Floats<kEachPack>;

// Elements that pass through the first-level cache together.
constexpr int kNormBlock = 2048;
static_assert(kNormBlock % kEach == 0 && kNormBlock <= kMaxBlock, "whole packs, as many as add_squares takes");

SHARDOPT_HD Pack load_pack(const char* from, DType dtype) { return load_floats<kEachPack>(from, dtype, 0); }

SHARDOPT_HD void store_pack(char* to, DType dtype, Pack x) {
  if (dtype == DType::kFloat32) return store_lanes(reinterpret_cast<float*>(to), x);
  store_lanes(reinterpret_cast<uint16_t*>(to), dtype == DType::kBFloat16 ? bf16_from_float(x) : fp16_from_float(x));
}

// Calls act(address) for every kEach elements. If the last are fewer, calls act with a copy that zeros fill up; if
// kWrites, the copy is copied back.
template <bool kWrites, class Act>
SHARDOPT_HD void each_pack(char* gradient, uint64_t bytes, int64_t n, Act act) {
  for (; n >= kEach; n -= kEach, gradient += kEach * bytes) act(gradient);
  if (n == 0) return;
  alignas(64) char last[kEach * sizeof(float)] = {};
  copy_bytes(last, gradient, static_cast<uint64_t>(n) * bytes);
  act(last);
  if (kWrites) copy_bytes(gradient, last, static_cast<uint64_t>(n) * bytes);
}

void squares(ExactSum& sum, const char* gradient, DType dtype, int64_t n) {
  alignas(64) float floats[kNormBlock];
  // Low bits of a float32 that are zero for numbers with 8 or 11 significant bits.
  const int zeros = dtype == DType::kFloat32 ? 0 : dtype == DType::kBFloat16 ? 16 : 13;
  for (int64_t left = n; left > 0; left -= kNormBlock, gradient += kNormBlock * bytes_of(dtype)) {
    const int count = static_cast<int>(left < kNormBlock ? left : kNormBlock);
    const char* const ahead = gradient + kNormBlock * bytes_of(dtype);
    if (dtype == DType::kFloat32 && count % kEach == 0) {
      add_squares(sum, reinterpret_cast<const float*>(gradient), count, zeros, ahead);
      continue;
    }
    float* to = floats;
    each_pack<false>(const_cast<char*>(gradient), bytes_of(dtype), count, [&](const char* from) {
      store_lanes(to, load_pack(from, dtype));
      to += kEach;
    });
    add_squares(sum, floats, static_cast<int>(to - floats), zeros, ahead);
  }
}

int32_t largest(const char* gradient, DType dtype, int64_t n) {
  LaneExtremes extremes = LaneExtremes::none();
  each_pack<false>(const_cast<char*>(gradient), bytes_of(dtype), n,
                   [&](const char* from) { extremes.add_signed(load_pack(from, dtype)); });
  return extremes.over_lanes().high;
}

void scale(char* gradient, DType dtype, int64_t n, float factor) {
  each_pack<true>(gradient, bytes_of(dtype), n,
                  [&](char* at) { store_pack(at, dtype, load_pack(at, dtype) * Pack(factor)); });
}

}  // namespace

NormKernels norm_kernels() { return {squares, largest, scale}; }

SHARDOPT_END_NAMESPACE
