// The kernels that code messages and add them up on CUDA: a warp takes a block of 128, each lane four successive
// elements.
#pragma once

#include <cuda_runtime.h>

#include "comm/e4m3.h"

#if !defined(SHARDOPT_DEVICE)
#define SHARDOPT_DEVICE __device__ __forceinline__
#endif

SHARDOPT_BEGIN_NAMESPACE

constexpr int kMessageThreads = 256;
constexpr int kLaneElements = 4;
constexpr int kMessageWarp = kMessageBlock / kLaneElements;
static_assert(kMessageWarp == 32, "a warp takes a block");

// Four successive elements of one dtype.
template <DType kDType>
struct Elements {
  using Number = uint16_t;
  using Vector = uint2;
};
template <>
struct Elements<DType::kFloat32> {
  using Number = uint32_t;
  using Vector = uint4;
};

template <DType kDType>
SHARDOPT_DEVICE float float_from_number(uint32_t number) {
  const int32_t b = static_cast<int32_t>(number);
  if constexpr (kDType == DType::kFloat32) return float_from_bits(b);
  if constexpr (kDType == DType::kBFloat16) return float_from_bf16(b);
  if constexpr (kDType == DType::kFloat16) return float_from_fp16(b);
}

template <DType kDType>
SHARDOPT_DEVICE uint32_t number_from_float(float x) {
  if constexpr (kDType == DType::kFloat32) return static_cast<uint32_t>(bits(x));
  if constexpr (kDType == DType::kBFloat16) return static_cast<uint32_t>(bf16_from_float(x)) & 0xffff;
  if constexpr (kDType == DType::kFloat16) return static_cast<uint32_t>(fp16_from_float(x)) & 0xffff;
}

// Loads the first n of four elements; the others are 0. Loads all four at once if n >= 4 and the address is aligned.
template <DType kDType>
SHARDOPT_DEVICE void load_four(const void* floats, int64_t element, int64_t n, float (&x)[kLaneElements]) {
  using Number = typename Elements<kDType>::Number;
  using Vector = typename Elements<kDType>::Vector;
  const Number* from = static_cast<const Number*>(floats) + element;
  if (n >= kLaneElements && reinterpret_cast<uint64_t>(from) % sizeof(Vector) == 0) {
    const Vector all = *reinterpret_cast<const Vector*>(from);
    if constexpr (kDType == DType::kFloat32) {
      const uint32_t words[] = {all.x, all.y, all.z, all.w};
      for (int i = 0; i < kLaneElements; ++i) x[i] = float_from_number<kDType>(words[i]);
    } else {
      const uint32_t words[] = {all.x & 0xffff, all.x >> 16, all.y & 0xffff, all.y >> 16};
      for (int i = 0; i < kLaneElements; ++i) x[i] = float_from_number<kDType>(words[i]);
    }
  } else {
    for (int i = 0; i < kLaneElements; ++i) x[i] = i < n ? float_from_number<kDType>(from[i]) : 0.0f;
  }
}

template <DType kDType>
SHARDOPT_DEVICE void store_four(void* floats, int64_t element, int64_t n, const float (&x)[kLaneElements]) {
  using Number = typename Elements<kDType>::Number;
  using Vector = typename Elements<kDType>::Vector;
  Number* to = static_cast<Number*>(floats) + element;
  uint32_t number[kLaneElements];
  for (int i = 0; i < kLaneElements; ++i) number[i] = number_from_float<kDType>(x[i]);
  if (n >= kLaneElements && reinterpret_cast<uint64_t>(to) % sizeof(Vector) == 0) {
    Vector all;
    if constexpr (kDType == DType::kFloat32) {
      all = {number[0], number[1], number[2], number[3]};
    } else {
      all = {number[0] | number[1] << 16, number[2] | number[3] << 16};
    }
    *reinterpret_cast<Vector*>(to) = all;
  } else {
    for (int i = 0; i < kLaneElements; ++i)
      if (i < n) to[i] = static_cast<Number>(number[i]);
  }
}

// The blocks that a warp takes turn by turn.
struct Turns {
  const int64_t all, stride;
  int64_t block;

  SHARDOPT_DEVICE Turns(int64_t blocks, int64_t thread_blocks)
      : all(blocks),
        stride(thread_blocks * (kMessageThreads / kMessageWarp)),
        block((blockIdx.x * int64_t{kMessageThreads} + threadIdx.x) / kMessageWarp) {}
  SHARDOPT_DEVICE bool go_on() const { return block < all; }
  SHARDOPT_DEVICE void next() { block += stride; }
};

// The index of a lane's first element in its block.
SHARDOPT_DEVICE int lane_element() { return static_cast<int>(threadIdx.x) % kMessageWarp * kLaneElements; }

SHARDOPT_DEVICE BlockPlace place_of(const MessageLayout& layout, int64_t block, int64_t raw_bytes) {
  return block_place(layout.parts[part_of(layout, block)], block, raw_bytes);
}

template <DType kDType>
__global__ void __launch_bounds__(kMessageThreads) encode_blocks(const EncodeCall call, int64_t thread_blocks) {
  const int64_t blocks = call.layout.blocks;
  for (Turns at(call.chunks * blocks, thread_blocks); at.go_on(); at.next()) {
    const int64_t chunk = at.block / blocks;
    const BlockPlace place = place_of(call.layout, at.block - chunk * blocks, sizeof(float));
    const int element = lane_element();
    uint8_t* const message = call.message + chunk * call.layout.bytes;
    float x[kLaneElements];
    load_four<kDType>(call.floats, chunk * call.layout.numel + place.element + element, place.n - element, x);
    if (!place.is_coded) {
      if (element < place.n) store_four<DType::kFloat32>(message + place.byte, element, place.n - element, x);
      continue;
    }
    int32_t largest = 0;
    for (int i = 0; i < kLaneElements; ++i) {
      const int32_t b = magnitude_bits(x[i]);
      largest = max_int(largest, b < kInfinityBits ? b : 0);
    }
    for (int step = kMessageWarp / 2; step > 0; step /= 2)
      largest = max_int(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    const int32_t scale = scale_code(largest);
    uint32_t codes = 0;
    for (int i = 0; i < kLaneElements; ++i)
      codes |= static_cast<uint32_t>(e4m3_from_any(x[i], eight_scales(scale))) << (8 * i);
    if (element < aligned_bytes(place.n)) *reinterpret_cast<uint32_t*>(message + place.byte + element) = codes;
    if (element == 0) {
      uint8_t* const to = message + place.scale_byte;
      to[0] = static_cast<uint8_t>(scale);
      for (int64_t i = 1; i <= place.filling; ++i) to[i] = 0;
    }
  }
}

// Four elements, which are added at once.
struct Four {
  float x[kLaneElements];

  Four() = default;
  SHARDOPT_DEVICE explicit Four(float value) {
    for (int i = 0; i < kLaneElements; ++i) x[i] = value;
  }
  friend SHARDOPT_DEVICE Four operator+(Four a, const Four& b) {
    for (int i = 0; i < kLaneElements; ++i) a.x[i] = a.x[i] + b.x[i];
    return a;
  }
  friend SHARDOPT_DEVICE Four operator/(Four a, const Four& b) {
    for (int i = 0; i < kLaneElements; ++i) a.x[i] = a.x[i] / b.x[i];
    return a;
  }
};

template <DType kRaw>
__global__ void __launch_bounds__(kMessageThreads) sum_blocks(const SumCall call, int64_t thread_blocks) {
  constexpr int64_t kRawBytes = sizeof(typename Elements<kRaw>::Number);
  for (Turns at(call.layout.blocks, thread_blocks); at.go_on(); at.next()) {
    const BlockPlace place = place_of(call.layout, at.block, kRawBytes);
    const int in_block = lane_element();
    const int64_t n = place.n - in_block, element = place.element + in_block;
    if (n <= 0) continue;
    Four sums[kMostSums];
    add_terms(
        call, sums,
        [&](const float* from) {
          Four four;
          load_four<DType::kFloat32>(from, element, n, four.x);
          return four;
        },
        [&](int64_t t) {
          Four four;
          const uint8_t* const term = call.message + t * call.layout.bytes;
          if (place.is_coded) {
            const uint32_t codes = *reinterpret_cast<const uint32_t*>(term + place.byte + in_block);
            const float scale = scale_value(term[place.scale_byte]);
            for (int i = 0; i < kLaneElements; ++i)
              four.x[i] = float_from_e4m3(static_cast<int32_t>(codes >> (8 * i)) & 0xff) * scale;
          } else {
            load_four<kRaw>(term + place.byte, in_block, n, four.x);
          }
          return four;
        },
        [&](float* to, const Four& four) { store_four<DType::kFloat32>(to, element, n, four.x); },
        [&](const Four& four) {
          if (call.dtype == DType::kFloat32) store_four<DType::kFloat32>(call.mean, element, n, four.x);
          if (call.dtype == DType::kBFloat16) store_four<DType::kBFloat16>(call.mean, element, n, four.x);
          if (call.dtype == DType::kFloat16) store_four<DType::kFloat16>(call.mean, element, n, four.x);
        });
  }
}

inline auto encode_of(DType dtype) -> void (*)(const EncodeCall, int64_t) {
  return dtype == DType::kFloat32    ? encode_blocks<DType::kFloat32>
         : dtype == DType::kBFloat16 ? encode_blocks<DType::kBFloat16>
                                     : encode_blocks<DType::kFloat16>;
}
inline auto sum_of(DType raw) -> void (*)(const SumCall, int64_t) {
  return raw == DType::kFloat32    ? sum_blocks<DType::kFloat32>
         : raw == DType::kBFloat16 ? sum_blocks<DType::kBFloat16>
                                   : sum_blocks<DType::kFloat16>;
}

// The number of thread blocks of a launch: as many as the work needs, but at most kMost, which keep a large device
// busy.
inline int64_t message_thread_blocks(int64_t blocks) {
  constexpr int64_t kMost = 1024;
  const int64_t needed = (blocks * kMessageWarp + kMessageThreads - 1) / kMessageThreads;
  return needed < kMost ? needed : kMost;
}

SHARDOPT_END_NAMESPACE
