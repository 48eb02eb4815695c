// Checks the kernel rows of a step's table, once, where the table is made.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/call.h"

namespace shardopt {

// A cut block has one set of scales and extremes per row. Columns of a second block would be stepped as part of the
// first, with scales and extremes read and written beyond the end of their tensors.
inline void check_cut_blocks(const KernelRow* kernel_rows, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const KernelRow& kernel_row = kernel_rows[i];
    if (!kernel_row.cut || kernel_row.cols == 0) continue;
    const int64_t first = kernel_row.first_element % std::max<int64_t>(kernel_row.global_row_numel, 1);
    if (first / kernel_row.block_size != (first + kernel_row.cols - 1) / kernel_row.block_size) {
      throw std::invalid_argument("kernel row " + std::to_string(i) + ": got a cut block of " +
                                  std::to_string(kernel_row.cols) + " columns from " + std::to_string(first) +
                                  ", expected columns of one block of " + std::to_string(kernel_row.block_size) +
                                  "; make a kernel row for each block");
    }
  }
}

}  // namespace shardopt
