// How a lane of a warp reads and writes its consecutive elements of a tensor.
#pragma once

#include <cuda_runtime.h>

#include "core/call.h"
#include "core/numeric.h"

SHARDOPT_BEGIN_NAMESPACE

constexpr int kLane = 4;  // elements per lane and chunk

// A code as what codecs decode.
__device__ inline int32_t as_number(uint8_t code) { return code; }
__device__ inline int32_t as_number(uint16_t code) { return code; }
__device__ inline float as_number(float code) { return code; }

template <class T>
struct alignas(sizeof(T) * kLane) Vector {
  T x[kLane];
};

template <class T>
__device__ Vector<T> load_lane(const T* from, int n) {
  Vector<T> v{};
  if (n == kLane && reinterpret_cast<uint64_t>(from) % sizeof v == 0) {
    v = *reinterpret_cast<const Vector<T>*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      if (i < n) v.x[i] = from[i];
    }
  }
  return v;
}

template <class T>
__device__ void store_lane(T* to, const Vector<T>& v, int n) {
  if (n == kLane && reinterpret_cast<uint64_t>(to) % sizeof v == 0) {
    *reinterpret_cast<Vector<T>*>(to) = v;
  } else {
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      if (i < n) to[i] = v.x[i];
    }
  }
}

__device__ inline void load_floats(float (&to)[kLane], uint64_t address, int32_t dtype, int64_t offset, int n) {
  if (static_cast<DType>(dtype) == DType::kFloat32) {
    const Vector<float> v = load_lane(reinterpret_cast<const float*>(address) + offset, n);
#pragma unroll
    for (int i = 0; i < kLane; ++i) to[i] = v.x[i];
    return;
  }
  const Vector<uint16_t> v = load_lane(reinterpret_cast<const uint16_t*>(address) + offset, n);
  const bool is_bf16 = static_cast<DType>(dtype) == DType::kBFloat16;
#pragma unroll
  for (int i = 0; i < kLane; ++i)
    to[i] = is_bf16 ? float_from_bf16(as_number(v.x[i])) : float_from_fp16(as_number(v.x[i]));
}

__device__ inline void store_floats(uint64_t address, const float (&from)[kLane], int32_t dtype, int64_t offset,
                                    int n) {
  if (static_cast<DType>(dtype) == DType::kFloat32) {
    Vector<float> v;
#pragma unroll
    for (int i = 0; i < kLane; ++i) v.x[i] = from[i];
    store_lane(reinterpret_cast<float*>(address) + offset, v, n);
    return;
  }
  Vector<uint16_t> v;
  const bool is_bf16 = static_cast<DType>(dtype) == DType::kBFloat16;
#pragma unroll
  for (int i = 0; i < kLane; ++i)
    v.x[i] = static_cast<uint16_t>(is_bf16 ? bf16_from_float(from[i]) : fp16_from_float(from[i]));
  store_lane(reinterpret_cast<uint16_t*>(address) + offset, v, n);
}

SHARDOPT_END_NAMESPACE
