// Cuts kernel rows with blocks of kAlignedBlock elements, and rows of any length, into chunks for StagedStepper:
// several whole rows, or some blocks of a row that is longer than a chunk.
#pragma once

#include "core/dither.h"
#include "core/target.h"
#include "step/cuda.h"

SHARDOPT_BEGIN_NAMESPACE

constexpr int kChunkElements = 1056;  // at most, of a chunk: 8 rows of 132, 32 rows of 33
constexpr int kChunkBlocks = 32;
constexpr int kTaskChunks = 8;  // chunks of a task; up to twice as many if rows end within the task
constexpr int kLongBlock = 64;  // elements from which on a block is long
constexpr int kLongLanes = 8;   // lanes that step a long block
constexpr int kShortLanes = 4;  // lanes that step a shorter block
constexpr int kLongTurn = 4;    // long blocks that a warp steps together
constexpr int kShortTurn = 8;   // shorter blocks that a warp steps together
constexpr int kPartBlocks = 8;  // blocks of a chunk that is part of a row

struct RowShape {
  int blocks;  // blocks of a row
  int rows;    // rows of a chunk; 0 if a chunk is part of a row
  int long_blocks = 0;

  SHARDOPT_HD explicit RowShape(const KernelRow& kernel_row)
      : blocks(static_cast<int>((kernel_row.cols + kAlignedBlock - 1) / kAlignedBlock)), rows(0) {
    if (kernel_row.cols > kChunkElements) return;
    const int cols = static_cast<int>(kernel_row.cols);
    const bool one_after_the_other = kernel_row.row_stride == kernel_row.cols && kernel_row.scales_row_stride == blocks;
    rows = kChunkElements / cols < kChunkBlocks / blocks ? kChunkElements / cols : kChunkBlocks / blocks;
    if (!one_after_the_other) rows = 1;
    // Takes as many rows as fill turns: an even number of rows with two long blocks each, for example.
    long_blocks = blocks - (cols % kAlignedBlock != 0 && cols % kAlignedBlock < kLongBlock);
    int unit = long_blocks == 0 ? kShortTurn : kLongTurn;
    if (long_blocks > 0 && long_blocks % 2 == 0) unit = long_blocks % 4 == 0 ? 1 : 2;
    if (rows > unit) rows -= rows % unit;
  }

  SHARDOPT_HD int chunk_blocks() const { return rows > 0 ? rows * blocks : kPartBlocks; }
};

// Consecutive blocks: whole rows, or blocks of a row.
struct Chunk {
  int64_t element, scale;  // places of the first element in tensors, of the first block in scales
  int rows;
  int row_blocks;  // blocks of each row
  int row_elements;
  uint32_t inverse;  // 2^16 over the number of long blocks of a row, rounded up; 0 for part of a row
  uint32_t global;   // the first element's index in the flattened global parameter, modulo 2^32
};

// The chunks of a task, one after the other.
class ChunkWalk {
 public:
  int blocks_left;

  SHARDOPT_HD ChunkWalk(const KernelRow& kernel_row, const CudaTask& task)
      : blocks_left(task.blocks),
        kernel_row_(kernel_row),
        shape_(kernel_row),
        row_(task.first_block / shape_.blocks),
        block_(static_cast<int>(task.first_block - row_ * shape_.blocks)),
        rows_left_(task.blocks / shape_.blocks),
        inverse_(shape_.long_blocks > 0 ? 65536 / static_cast<uint32_t>(shape_.long_blocks) + 1 : 0) {}

  SHARDOPT_HD Chunk next() {
    Chunk chunk;
    chunk.element = row_ * kernel_row_.row_stride + block_ * int64_t{kAlignedBlock};
    chunk.scale = row_ * kernel_row_.scales_row_stride + block_;
    chunk.global = static_cast<uint32_t>(global_element(kernel_row_, row_, block_ * int64_t{kAlignedBlock}));
    chunk.rows = 1;
    chunk.row_blocks = shape_.blocks;
    chunk.row_elements = static_cast<int>(kernel_row_.cols);
    chunk.inverse = 0;
    if (shape_.rows > 0) {
      chunk.inverse = inverse_;
      chunk.rows = shape_.rows < rows_left_ ? shape_.rows : rows_left_;
      rows_left_ -= chunk.rows;
      row_ += chunk.rows;
    } else {
      const int in_row = shape_.blocks - block_, most = in_row < kPartBlocks ? in_row : kPartBlocks;
      const bool is_last = most == in_row && most <= blocks_left;
      chunk.row_blocks = most < blocks_left ? most : blocks_left;
      chunk.row_elements = is_last ? static_cast<int>(kernel_row_.cols - block_ * int64_t{kAlignedBlock})
                                   : chunk.row_blocks * kAlignedBlock;
      block_ = is_last ? 0 : block_ + chunk.row_blocks;
      row_ += is_last;
    }
    blocks_left -= chunk.rows * chunk.row_blocks;
    return chunk;
  }

 private:
  const KernelRow& kernel_row_;
  const RowShape shape_;
  int64_t row_;
  int block_;  // in the row
  int rows_left_;
  uint32_t inverse_;
};

SHARDOPT_END_NAMESPACE
