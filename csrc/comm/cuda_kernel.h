// The kernels that code and decode messages on CUDA: a warp takes a block of 128, each lane four successive elements.
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

// Loads the first n of four elements; the others are 0. Together where all are there and lie so.
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

// The elements that a lane takes turn by turn. All lanes of a warp are in one block, and end together.
struct Turns {
  const MessageCall& call;
  const int64_t blocks, stride;  // blocks per chunk, and elements between a lane's turns
  int64_t chunk, in_chunk;       // index of the chunk, and of the lane's first element in it

  SHARDOPT_DEVICE Turns(const MessageCall& c, int64_t thread_blocks)
      : call(c),
        blocks(message_blocks(c.chunk_numel)),
        stride(thread_blocks * kMessageThreads * kLaneElements),
        chunk(0),
        in_chunk((blockIdx.x * int64_t{kMessageThreads} + threadIdx.x) * kLaneElements) {
    const int64_t in_all = in_chunk;  // one division per lane: it takes a hundred instructions
    chunk = in_all / (blocks * kMessageBlock);
    in_chunk = in_all - chunk * blocks * kMessageBlock;
  }

  SHARDOPT_DEVICE bool go_on() const { return chunk < call.chunks; }
  SHARDOPT_DEVICE void next() {
    for (in_chunk += stride; in_chunk >= blocks * kMessageBlock && chunk < call.chunks; ++chunk)
      in_chunk -= blocks * kMessageBlock;
  }

  SHARDOPT_DEVICE int64_t element() const { return chunk * call.chunk_numel + in_chunk; }
  // Elements of the chunk and of the tensor from the first one on; none or less beyond its end.
  SHARDOPT_DEVICE int64_t left() const {
    const int64_t of_chunk = call.chunk_numel - in_chunk, of_tensor = call.numel - element();
    return of_chunk < of_tensor ? of_chunk : of_tensor;
  }
};

template <DType kDType>
__global__ void __launch_bounds__(kMessageThreads) encode_blocks(const MessageCall call, int64_t thread_blocks) {
  const int64_t bytes = chunk_bytes(call.chunk_numel), codes_bytes = aligned_bytes(call.chunk_numel);
  for (Turns at(call, thread_blocks); at.go_on(); at.next()) {
    float x[kLaneElements];
    load_four<kDType>(call.floats, at.element(), at.left(), x);
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
    uint8_t* const chunk = call.message + at.chunk * bytes;
    if (at.in_chunk < codes_bytes) *reinterpret_cast<uint32_t*>(chunk + at.in_chunk) = codes;
    if (at.in_chunk % kMessageBlock == 0) {
      const int64_t block = at.in_chunk / kMessageBlock;
      chunk[codes_bytes + block] = static_cast<uint8_t>(scale);
      if (block == at.blocks - 1)
        for (int64_t i = codes_bytes + at.blocks; i < bytes; ++i) chunk[i] = 0;
    }
  }
}

template <DType kDType>
__global__ void __launch_bounds__(kMessageThreads) decode_blocks(const MessageCall call, int64_t thread_blocks) {
  const int64_t bytes = chunk_bytes(call.chunk_numel), codes_bytes = aligned_bytes(call.chunk_numel);
  for (Turns at(call, thread_blocks); at.go_on(); at.next()) {
    const int64_t left = at.left();
    if (left <= 0) continue;
    const uint8_t* term = call.message + at.chunk * call.terms * bytes;
    float sum[kLaneElements];
    for (int64_t t = 0; t < call.terms; ++t, term += bytes) {
      const uint32_t codes = *reinterpret_cast<const uint32_t*>(term + at.in_chunk);
      const float scale = scale_value(term[codes_bytes + at.in_chunk / kMessageBlock]);
      for (int i = 0; i < kLaneElements; ++i) {
        const float x = float_from_e4m3(static_cast<int32_t>(codes >> (8 * i)) & 0xff) * scale;
        sum[i] = t == 0 ? x : sum[i] + x;
      }
    }
    for (int i = 0; i < kLaneElements; ++i) sum[i] = sum[i] * call.factor;
    store_four<kDType>(call.floats, at.element(), left, sum);
  }
}

using MessageBlocks = void (*)(const MessageCall, int64_t);

inline MessageBlocks encode_of(DType dtype) {
  return dtype == DType::kFloat32    ? encode_blocks<DType::kFloat32>
         : dtype == DType::kBFloat16 ? encode_blocks<DType::kBFloat16>
                                     : encode_blocks<DType::kFloat16>;
}
inline MessageBlocks decode_of(DType dtype) {
  return dtype == DType::kFloat32    ? decode_blocks<DType::kFloat32>
         : dtype == DType::kBFloat16 ? decode_blocks<DType::kBFloat16>
                                     : decode_blocks<DType::kFloat16>;
}

// Thread blocks of a launch: as many as there is work for, within what keeps a large device busy.
inline int64_t message_thread_blocks(const MessageCall& call) {
  constexpr int64_t kMost = 1024;
  const int64_t lanes = call.chunks * message_blocks(call.chunk_numel) * kMessageWarp;
  const int64_t needed = (lanes + kMessageThreads - 1) / kMessageThreads;
  return needed < kMost ? needed : kMost;
}

SHARDOPT_END_NAMESPACE
