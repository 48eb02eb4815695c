// Arguments of the messages' calls from Python.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "comm/message.h"

namespace shardopt {

// The layout of a chunk: address and number of its parts; its blocks, elements and bytes.
using LayoutArguments = std::tuple<uint64_t, int64_t, int64_t, int64_t, int64_t>;

inline MessageLayout message_layout(const LayoutArguments& of) {
  const auto [parts, count, blocks, numel, bytes] = of;
  if (count < 1 || blocks < 1) throw std::invalid_argument("got a layout without blocks, expected blocks");
  return {reinterpret_cast<const MessagePart*>(parts), count, blocks, numel, bytes};
}

// Turns addresses into pointers.
inline EncodeCall encode_call(const LayoutArguments& layout, uint64_t floats, DType dtype, uint64_t message,
                              int64_t chunks) {
  return {message_layout(layout), reinterpret_cast<const void*>(floats), reinterpret_cast<uint8_t*>(message), chunks,
          dtype};
}

// Throws std::invalid_argument if the number of sums that the terms leave is not the number of addresses.
inline SumCall sum_call(const LayoutArguments& layout, uint64_t message, DType raw, int64_t terms, int64_t first,
                        int64_t begin, const std::vector<uint64_t>& in, const std::vector<uint64_t>& out, uint64_t mean,
                        DType dtype, float divisor) {
  int64_t depth = static_cast<int64_t>(in.size()), least = depth, most = depth;
  for (int64_t t = 0; t < terms; ++t) {
    depth -= generic::sums_before(first + t, begin);
    least = std::min(least, depth);
    most = std::max(most, ++depth);
  }
  if (least < 0 || most > kMostSums || (mean ? most == 0 : depth != static_cast<int64_t>(out.size()))) {
    throw std::invalid_argument("got " + std::to_string(in.size()) + " sums before " + std::to_string(terms) +
                                " terms from number " + std::to_string(first) + " on, and " +
                                std::to_string(out.size()) + " afterwards, which do not fit");
  }
  SumCall call{message_layout(layout),
               reinterpret_cast<const uint8_t*>(message),
               terms,
               first,
               begin,
               static_cast<int32_t>(in.size()),
               static_cast<int32_t>(out.size()),
               {},
               {},
               reinterpret_cast<void*>(mean),
               divisor,
               dtype,
               raw};
  for (size_t i = 0; i < in.size(); ++i) call.in[i] = reinterpret_cast<const float*>(in[i]);
  for (size_t i = 0; i < out.size(); ++i) call.out[i] = reinterpret_cast<float*>(out[i]);
  return call;
}

}  // namespace shardopt
