// Reads and writes the consecutive elements of a lane of a warp: by 16 or 8 bytes at a time where the addresses allow,
// else one by one.
#pragma once

#include <cuda_runtime.h>

#if __CUDA_ARCH__ >= 800
#include <cuda_bf16.h>
#endif

#include "core/call.h"
#include "core/numeric.h"
#include "core/weight.h"

SHARDOPT_BEGIN_NAMESPACE

// Forces inlining: functions that are not inlined cannot keep their arrays in registers.
#define SHARDOPT_DEVICE __device__ __forceinline__

constexpr int kLane = 8;  // elements of a lane
constexpr int kWarp = 32;

// The value of the lane whose number differs in `lane_bits`. All lanes of the warp take part.
SHARDOPT_DEVICE int32_t exchange(int32_t x, int lane_bits) { return __shfl_xor_sync(0xffffffffu, x, lane_bits); }

// A code in the type that codecs decode.
SHARDOPT_DEVICE int32_t as_number(uint8_t code) { return code; }
SHARDOPT_DEVICE int32_t as_number(uint16_t code) { return code; }
SHARDOPT_DEVICE float as_number(float code) { return code; }

template <class T>
struct alignas(sizeof(T) == 1 ? 8 : 16) Vector {
  T x[kLane];
};

// The elements of a lane that exist: the first `n` of its kLane.
struct Span {
  int64_t element;  // index of the first one in the tensors
  int n;
  bool in_words;  // n is kLane, and the elements are aligned in every tensor
};

// Loads the span's elements, and `fill` beyond them. Each byte is used once: loads and stores are marked as streaming.
template <class T>
SHARDOPT_DEVICE Vector<T> load_lane(uint64_t address, const Span& span, T fill = T{}) {
  const T* from = reinterpret_cast<const T*>(address) + span.element;
  Vector<T> v;
  if (span.in_words) {
    if constexpr (sizeof v == sizeof(uint2)) {
      const uint2 word = __ldcs(reinterpret_cast<const uint2*>(from));
      __builtin_memcpy(&v, &word, sizeof word);
    } else {
      uint4 words[sizeof v / sizeof(uint4)];
#pragma unroll
      for (unsigned i = 0; i < sizeof v / sizeof(uint4); ++i)
        words[i] = __ldcs(reinterpret_cast<const uint4*>(from) + i);
      __builtin_memcpy(&v, words, sizeof v);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kLane; ++i) v.x[i] = i < span.n ? from[i] : fill;
  }
  return v;
}

template <class T>
SHARDOPT_DEVICE void store_lane(uint64_t address, const Vector<T>& v, const Span& span) {
  T* to = reinterpret_cast<T*>(address) + span.element;
  if (span.in_words) {
    if constexpr (sizeof v == sizeof(uint2)) {
      uint2 word;
      __builtin_memcpy(&word, &v, sizeof word);
      __stcs(reinterpret_cast<uint2*>(to), word);
    } else {
      uint4 words[sizeof v / sizeof(uint4)];
      __builtin_memcpy(words, &v, sizeof v);
#pragma unroll
      for (unsigned i = 0; i < sizeof v / sizeof(uint4); ++i) __stcs(reinterpret_cast<uint4*>(to) + i, words[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      if (i < span.n) to[i] = v.x[i];
    }
  }
}

// The nearest bfloat16, in the low half. In assembly, as nvcc would rearrange halves of words before storing them.
SHARDOPT_DEVICE uint32_t nearest_bf16(float x) {
#if __CUDA_ARCH__ >= 800
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(0.0f), "f"(x));
  return word;
#else
  return static_cast<uint32_t>(bf16_from_float(x));
#endif
}

SHARDOPT_DEVICE Vector<uint16_t> bf16_lane(const float (&x)[kLane]) {
  Vector<uint16_t> v;
#pragma unroll
  for (int i = 0; i < kLane; i += 2) {
#if __CUDA_ARCH__ >= 800
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x[i], x[i + 1]);
    __builtin_memcpy(&v.x[i], &pair, sizeof pair);
#else
    for (int j = i; j < i + 2; ++j) v.x[j] = static_cast<uint16_t>(bf16_from_float(x[j]));
#endif
  }
  return v;
}

// The fields of a kernel row that every turn needs; the other fields are seldom used and read on use.
struct Streams {
  const KernelRow& kernel_row;
  uint64_t param, gradient;
  WeightFormat weight_format;
  DType gradient_dtype;

  SHARDOPT_DEVICE explicit Streams(const KernelRow& from)
      : kernel_row(from),
        param(kernel_row.param),
        gradient(kernel_row.gradient),
        weight_format(static_cast<WeightFormat>(kernel_row.weight_format)),
        gradient_dtype(static_cast<DType>(kernel_row.gradient_dtype)) {}
};

SHARDOPT_DEVICE void load_gradients(float (&to)[kLane], const Streams& streams, const Span& span) {
  if (streams.gradient_dtype == DType::kFloat32) {
    const Vector<float> v = load_lane<float>(streams.gradient, span);
#pragma unroll
    for (int i = 0; i < kLane; ++i) to[i] = v.x[i];
    return;
  }
  const Vector<uint16_t> v = load_lane<uint16_t>(streams.gradient, span);
  if (streams.gradient_dtype == DType::kBFloat16) {
#pragma unroll
    for (int i = 0; i < kLane; ++i) to[i] = float_from_bf16(as_number(v.x[i]));
  } else {
#pragma unroll
    for (int i = 0; i < kLane; ++i) to[i] = float_from_fp16(as_number(v.x[i]));
  }
}

SHARDOPT_DEVICE void store_gradients(const float (&from)[kLane], const Streams& streams, const Span& span) {
  if (streams.gradient_dtype == DType::kFloat32) {
    Vector<float> v;
#pragma unroll
    for (int i = 0; i < kLane; ++i) v.x[i] = from[i];
    return store_lane(streams.gradient, v, span);
  }
  Vector<uint16_t> v = bf16_lane(from);
  if (streams.gradient_dtype == DType::kFloat16) {
#pragma unroll
    for (int i = 0; i < kLane; ++i) v.x[i] = static_cast<uint16_t>(fp16_from_float(from[i]));
  }
  store_lane(streams.gradient, v, span);
}

template <DType kDType, class Low>
SHARDOPT_DEVICE void load_split(float (&to)[kLane], const Vector<uint16_t>& high, const Streams& streams,
                                const Span& span) {
  const Vector<Low> low = load_lane<Low>(streams.kernel_row.low_bits, span);
#pragma unroll
  for (int i = 0; i < kLane; ++i) {
    to[i] = join_weight<kDType, 8 * sizeof(Low)>(as_number(high.x[i]), static_cast<int32_t>(low.x[i]));
  }
}

template <DType kDType, class Low>
SHARDOPT_DEVICE void store_split(const float (&from)[kLane], const Streams& streams, const Span& span) {
  Vector<uint16_t> high;
  Vector<Low> low;
#pragma unroll
  for (int i = 0; i < kLane; ++i) {
    const SplitWeight<int32_t> split = split_weight<kDType, 8 * sizeof(Low)>(from[i]);
    high.x[i] = static_cast<uint16_t>(split.high);
    low.x[i] = static_cast<Low>(split.low);
  }
  store_lane(streams.param, high, span);
  store_lane(streams.kernel_row.low_bits, low, span);
}

// The weights as the rule sees them.
SHARDOPT_DEVICE void load_weights(float (&to)[kLane], const Streams& streams, const Span& span) {
  if (streams.weight_format == WeightFormat::kFloat32) {
    const Vector<float> v = load_lane<float>(streams.param, span);
#pragma unroll
    for (int i = 0; i < kLane; ++i) to[i] = v.x[i];
    return;
  }
  const Vector<uint16_t> v = load_lane<uint16_t>(streams.param, span);
  switch (streams.weight_format) {
    case WeightFormat::kBFloat16Plus8:
      return load_split<DType::kBFloat16, int8_t>(to, v, streams, span);
    case WeightFormat::kBFloat16Plus16:
      return load_split<DType::kBFloat16, int16_t>(to, v, streams, span);
    case WeightFormat::kFloat16Plus8:
      return load_split<DType::kFloat16, int8_t>(to, v, streams, span);
    case WeightFormat::kFloat16Plus16:
      return load_split<DType::kFloat16, int16_t>(to, v, streams, span);
    case WeightFormat::kFloat16:
#pragma unroll
      for (int i = 0; i < kLane; ++i) to[i] = float_from_fp16(as_number(v.x[i]));
      return;
    default:
#pragma unroll
      for (int i = 0; i < kLane; ++i) to[i] = float_from_bf16(as_number(v.x[i]));
  }
}

// Stores weights in their format. step: the step count. element: index of the first element in the flattened global
// parameter, modulo 2^32.
SHARDOPT_DEVICE void store_weights(const float (&from)[kLane], const Streams& streams, const Span& span, float step,
                                   uint32_t element) {
  switch (streams.weight_format) {
    case WeightFormat::kFloat32: {
      Vector<float> v;
#pragma unroll
      for (int i = 0; i < kLane; ++i) v.x[i] = from[i];
      return store_lane(streams.param, v, span);
    }
    case WeightFormat::kFloat16: {
      Vector<uint16_t> v;
#pragma unroll
      for (int i = 0; i < kLane; ++i) v.x[i] = static_cast<uint16_t>(fp16_from_float(from[i]));
      return store_lane(streams.param, v, span);
    }
    case WeightFormat::kBFloat16Plus8:
      return store_split<DType::kBFloat16, int8_t>(from, streams, span);
    case WeightFormat::kBFloat16Plus16:
      return store_split<DType::kBFloat16, int16_t>(from, streams, span);
    case WeightFormat::kFloat16Plus8:
      return store_split<DType::kFloat16, int8_t>(from, streams, span);
    case WeightFormat::kFloat16Plus16:
      return store_split<DType::kFloat16, int16_t>(from, streams, span);
    case WeightFormat::kBFloat16Stochastic: {
      const Noise noise(streams.kernel_row.noise_key, step, element);
      Vector<uint16_t> v;
#pragma unroll
      for (int i = 0; i < kLane; ++i) v.x[i] = static_cast<uint16_t>(bf16_at_random(from[i], noise.bits_at(i)));
      return store_lane(streams.param, v, span);
    }
    default:
      return store_lane(streams.param, bf16_lane(from), span);
  }
}

SHARDOPT_END_NAMESPACE
