// Reads and writes the CPU's vectors: floats of any dtype, weights in their formats, extremes, codes.
#pragma once

#include <type_traits>

#include "core/call.h"
#include "core/codec.h"
#include "core/weight.h"

SHARDOPT_BEGIN_NAMESPACE

constexpr uint64_t bytes_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
constexpr uint64_t bytes_of(WeightFormat format) { return format == WeightFormat::kFloat32 ? 4 : 2; }

// The dtype of a parameter with a weight format.
constexpr DType dtype_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFloat32:
      return DType::kFloat32;
    case WeightFormat::kFloat16:
    case WeightFormat::kFloat16Plus8:
    case WeightFormat::kFloat16Plus16:
      return DType::kFloat16;
    case WeightFormat::kBFloat16:
    case WeightFormat::kBFloat16Plus8:
    case WeightFormat::kBFloat16Plus16:
    case WeightFormat::kBFloat16Stochastic:
      break;
  }
  return DType::kBFloat16;
}

constexpr uint64_t low_bytes_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::kBFloat16Plus8:
    case WeightFormat::kFloat16Plus8:
      return 1;
    case WeightFormat::kBFloat16Plus16:
    case WeightFormat::kFloat16Plus16:
      return 2;
    default:
      return 0;
  }
}

template <int kPack>
SHARDOPT_HD Floats<kPack> load_floats(const char* from, DType dtype, int i) {
  switch (dtype) {
    case DType::kFloat32:
      return load_lanes<kPack>(reinterpret_cast<const float*>(from) + i);
    case DType::kBFloat16:
      return float_from_bf16(load_lanes<kPack>(reinterpret_cast<const uint16_t*>(from) + i));
    default:
      return float_from_fp16(load_lanes<kPack>(reinterpret_cast<const uint16_t*>(from) + i));
  }
}

// Whether one of `n` codes is zero.
SHARDOPT_HD bool any_zero(const uint8_t* codes, int n) {
#if defined(SHARDOPT_FINDS_ZERO_BYTES)
  constexpr int kBytes = sizeof(native::Bytes);
  if (n % kBytes == 0) {
    native::Bytes least;
    __builtin_memcpy(&least, codes, kBytes);
    for (int i = kBytes; i < n; i += kBytes) {
      native::Bytes y;
      __builtin_memcpy(&y, codes + i, kBytes);
      least = native::min_byte(least, y);
    }
    return native::any_zero(least);
  }
#endif
  uint8_t least = 255;  // the compiler makes a vector of it
  for (int i = 0; i < n; ++i) least = codes[i] < least ? codes[i] : least;
  return least == 0;
}

// Inline: most copies are short and as long as the previous copy, so that their branches are predicted.
SHARDOPT_HD void copy_bytes(void* to, const void* from, uint64_t n) {
  auto t = static_cast<char*>(to);
  auto f = static_cast<const char*>(from);
  for (; n >= 16; n -= 16, t += 16, f += 16) __builtin_memcpy(t, f, 16);
  const auto copy = [&](uint64_t bytes) {
    if (!(n & bytes)) return;
    __builtin_memcpy(t, f, bytes);
    t += bytes;
    f += bytes;
  };
  copy(8), copy(4), copy(2), copy(1);
}

// The weights of a block.
struct Weights {
  char* words;     // the parameter
  char* low_bits;  // the master weights' low bits
  Noise noise;

  template <int kPack>
  SHARDOPT_HD Floats<kPack> load(WeightFormat format, int i) const {
    const auto words16 = reinterpret_cast<const uint16_t*>(words) + i;
    switch (format) {
      case WeightFormat::kFloat32:
        return load_lanes<kPack>(reinterpret_cast<const float*>(words) + i);
      case WeightFormat::kFloat16:
        return float_from_fp16(load_lanes<kPack>(words16));
      case WeightFormat::kBFloat16Plus8:
        return load_split<kPack, DType::kBFloat16, int8_t>(i);
      case WeightFormat::kBFloat16Plus16:
        return load_split<kPack, DType::kBFloat16, int16_t>(i);
      case WeightFormat::kFloat16Plus8:
        return load_split<kPack, DType::kFloat16, int8_t>(i);
      case WeightFormat::kFloat16Plus16:
        return load_split<kPack, DType::kFloat16, int16_t>(i);
      default:
        return float_from_bf16(load_lanes<kPack>(words16));
    }
  }

  template <int kPack>
  SHARDOPT_HD void store(Floats<kPack> x, WeightFormat format, int i) const {
    const auto words16 = reinterpret_cast<uint16_t*>(words) + i;
    switch (format) {
      case WeightFormat::kFloat32:
        return store_lanes(reinterpret_cast<float*>(words) + i, x);
      case WeightFormat::kBFloat16:
        return store_lanes(words16, bf16_from_float(x));
      case WeightFormat::kFloat16:
        return store_lanes(words16, fp16_from_float(x));
      case WeightFormat::kBFloat16Plus8:
        return store_split<DType::kBFloat16, uint8_t>(x, i);
      case WeightFormat::kBFloat16Plus16:
        return store_split<DType::kBFloat16, uint16_t>(x, i);
      case WeightFormat::kFloat16Plus8:
        return store_split<DType::kFloat16, uint8_t>(x, i);
      case WeightFormat::kFloat16Plus16:
        return store_split<DType::kFloat16, uint16_t>(x, i);
      case WeightFormat::kBFloat16Stochastic:
        return store_lanes(words16, bf16_at_random(x, noise.bits_at(lane_index<kPack>() + i)));
    }
  }

 private:
  template <int kPack, DType kDType, class Low>
  SHARDOPT_HD Floats<kPack> load_split(int i) const {
    const auto high = load_lanes<kPack>(reinterpret_cast<const uint16_t*>(words) + i);
    const auto low = load_lanes<kPack>(reinterpret_cast<const Low*>(low_bits) + i);
    return join_weight<kDType, 8 * sizeof(Low)>(high, low);
  }

  template <DType kDType, class Low, int kPack>
  SHARDOPT_HD void store_split(Floats<kPack> x, int i) const {
    const auto split = split_weight<kDType, 8 * sizeof(Low)>(x);
    store_lanes(reinterpret_cast<uint16_t*>(words) + i, split.high);
    store_lanes(reinterpret_cast<Low*>(low_bits) + i, split.low);
  }
};

// The formats of a kernel row's weights and gradients.
struct Formats {
  WeightFormat weight;
  DType gradient;

  SHARDOPT_HD explicit Formats(const KernelRow& kernel_row)
      : weight(static_cast<WeightFormat>(kernel_row.weight_format)),
        gradient(static_cast<DType>(kernel_row.gradient_dtype)) {}
};

// The weights from an element of the tensor on.
SHARDOPT_HD Weights weights_at(const KernelRow& kernel_row, WeightFormat format, int64_t offset, Noise noise) {
  return {reinterpret_cast<char*>(kernel_row.param) + bytes_of(format) * offset,
          reinterpret_cast<char*>(kernel_row.low_bits) + low_bytes_of(format) * offset, noise};
}

// The extremes of some packs, lane by lane: the largest magnitude, and for unsigned numbers the smallest above zero,
// less one (zero less one wraps around and so does not count).
struct LaneExtremes {
  native::UnsignedInts high, low;

  SHARDOPT_HD static LaneExtremes none() { return {native::UnsignedInts{}, native::UnsignedInts{} - 1}; }

  template <int kPack>
  SHARDOPT_HD void add_signed(Floats<kPack> x) {
    const auto b = as_unsigned(magnitude_bits(x));
    for (int i = 0; i < kPack; ++i) high = native::max_int(high, b.x[i]);
  }

  template <bool kSmallest, int kPack>
  SHARDOPT_HD void add_unsigned(Floats<kPack> x) {
    const auto b = as_unsigned(bits(x));
    for (int i = 0; i < kPack; ++i) {
      high = native::max_int(high, b.x[i]);
      if (kSmallest) low = native::min_int(low, b.x[i] - 1);
    }
  }

  SHARDOPT_HD Extremes over_lanes() const {
    const int32_t least = static_cast<int32_t>(native::smallest(low) + 1);
    return {static_cast<int32_t>(native::largest(high)) & kMagnitudeMask, least == 0 ? 0 : kInfinityBits - least};
  }
};

// The table that a coder looks up, in the form that is fastest for packs; empty for a coder without a table.
template <class Coder, int kPack, class = void>
struct FastTable {
  SHARDOPT_HD explicit FastTable(const float*) {}

  SHARDOPT_HD Floats<kPack> decode(const Coder& coder, const uint8_t* codes) const {
    return coder.decode(load_lanes<kPack>(codes));
  }
  // Decodes codes in the low bytes of integers.
  SHARDOPT_HD Floats<kPack> decode(const Coder& coder, Ints<kPack> codes) const { return coder.decode(codes & 0xff); }
};

#if defined(SHARDOPT_BYTE_TABLES)
template <class Coder>
struct FastTable<Coder, 4, std::void_t<decltype(Coder::kTable)>> {
  native::ByteTable<Coder::kTable> table;

  SHARDOPT_HD explicit FastTable(const float* t) : table(Coder::values_in(t)) {}

  SHARDOPT_HD Floats<4> decode(const Coder& coder, const uint8_t* codes) const {
    Floats<4> found;
    table.look_up(codes, found.x);
    return found * coder.scale;
  }
  SHARDOPT_HD Floats<4> decode(const Coder& coder, Ints<4> codes) const {
    Floats<4> found;
    const Ints<4> bytes = codes & 0xff;
    table.look_up(bytes.x, found.x);
    return found * coder.scale;
  }
};
#endif

SHARDOPT_END_NAMESPACE
