// Checks of the step's table, once where it is made.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/call.h"

namespace shardopt {

// A cut block has one set of scales and extremes per row: columns of a second block would be taken for it, and what
// belongs to them read and written beyond its end.
inline void check_cut_blocks(const KernelRow* entries, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const KernelRow& entry = entries[i];
    if (!entry.cut || entry.cols == 0) continue;
    const int64_t first = entry.first_element % std::max<int64_t>(entry.global_row_numel, 1);
    if (first / entry.block_size != (first + entry.cols - 1) / entry.block_size) {
      throw std::invalid_argument("entry " + std::to_string(i) + ": got a cut block of " + std::to_string(entry.cols) +
                                  " columns from " + std::to_string(first) + ", expected columns of one block of " +
                                  std::to_string(entry.block_size) + "; make an entry for each block");
    }
  }
}

}  // namespace shardopt
