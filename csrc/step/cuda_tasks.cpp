#define SHARDOPT_TARGET tasks
#include <algorithm>

#include "step/cuda.h"
#include "step/cuda_chunk.h"
#include "step/instances.h"

namespace shardopt {
namespace {

// The number of elements per task: fewer for a short step, so that the last tasks do not keep most of the device
// waiting.
int64_t task_elements(int64_t elements) {
  constexpr int64_t kMany = 500'000'000, kSome = 50'000'000, kMost = kMaxTaskBlocks * kAlignedBlock;
  return elements >= kMany ? kMost : elements >= kSome ? kMost / 2 : kMost / 4;
}

// Whether a rule, a codec and a format have a kernel of their own.
template <class Codec, class... Rule>
bool has_kernel(int rule, int format, tasks::List<Rule...>) {
  const bool has[] = {tasks::has_cuda_kernel<Rule, Codec>(format)...};
  return has[rule];
}
template <class... Codec>
bool has_kernel(int rule, int codec, int format, tasks::List<Codec...>) {
  const bool has[] = {has_kernel<Codec>(rule, format, tasks::Rules{})...};
  return has[codec];
}

// Whether the kernel row has whole blocks, one after the other, and aligned addresses. Addresses may change from step
// to step: the kernels check them again.
bool is_aligned(const KernelRow& kernel_row) {
  const int64_t size = kernel_row.block_size;
  const bool contiguous = kernel_row.rows == 1 ||
                          (kernel_row.row_stride == kernel_row.cols && kernel_row.global_row_numel == kernel_row.cols &&
                           kernel_row.scales_row_stride * size == kernel_row.cols);
  const uint64_t codes = kernel_row.codes[0] | kernel_row.codes[1],
                 scales = kernel_row.scales[0] | kernel_row.scales[1];
  return contiguous && kernel_row.cols % size == 0 && kAlignedBlock <= size && size <= kLargestAlignedBlock &&
         (kernel_row.param | kernel_row.gradient | kernel_row.low_bits) % 16 == 0 && codes % 8 == 0 && scales % 8 == 0;
}

// The kernel row's format in kAlignedFormats if its blocks have kernels of their own; -1 otherwise.
int format_of(const KernelRow& kernel_row, int rule) {
  if (kernel_row.cut || kernel_row.rows == 0 || kernel_row.cols == 0) return -1;
  if (kernel_row.block_size != kAlignedBlock && !is_aligned(kernel_row)) return -1;
  // Staging would take short blocks that do not lie one after the other one by one.
  if (kernel_row.row_stride != kernel_row.cols && kernel_row.rows > 1 && kernel_row.cols < kAlignedBlock) return -1;
  for (int i = 0; i < kAlignedFormatCount; ++i) {
    if (kernel_row.weight_format == static_cast<int32_t>(kAlignedFormats[i].weight) &&
        kernel_row.gradient_dtype == static_cast<int32_t>(kAlignedFormats[i].gradient))
      return has_kernel(rule, kernel_row.codec, i, tasks::Codecs{}) ? i : -1;
  }
  return -1;
}

// The number of blocks of a staged task: whole chunks and, if a task has room for any, whole rows.
int64_t staged_task_blocks(const KernelRow& kernel_row, int64_t elements) {
  const tasks::RowShape shape(kernel_row);
  const int64_t chunk = shape.chunk_blocks();
  const int64_t chunk_elements = shape.rows > 0 ? shape.rows * kernel_row.cols : chunk * kAlignedBlock;
  const int64_t chunks = std::clamp<int64_t>(elements / chunk_elements, 1, tasks::kTaskChunks);
  if (shape.rows > 0) return chunks * chunk;
  const int64_t blocks = chunks * chunk;
  return blocks > shape.blocks ? blocks / shape.blocks * shape.blocks : blocks;
}

}  // namespace

CudaTasks make_cuda_tasks(const KernelRow* kernel_rows, int64_t row_count, const GroupRow* groups) {
  CudaTasks made;
  int64_t elements = 0;
  for (int64_t i = 0; i < row_count; ++i) elements += kernel_rows[i].rows * kernel_rows[i].cols;
  const int64_t per_task = task_elements(elements);
  const auto made_count = [&] { return static_cast<int64_t>(made.tasks.size()); };
  const auto add = [&](int64_t i, bool staged) {
    const KernelRow& kernel_row = kernel_rows[i];
    const int64_t blocks = kernel_row.rows * ((kernel_row.cols + kernel_row.block_size - 1) / kernel_row.block_size);
    const int64_t blocks_per_task =
        staged ? staged_task_blocks(kernel_row, per_task) : std::max<int64_t>(1, per_task / kernel_row.block_size);
    for (int64_t first = 0; first < blocks; first += blocks_per_task) {
      const int64_t count = std::min(blocks_per_task, blocks - first);
      made.tasks.push_back({first, static_cast<int32_t>(i), static_cast<int32_t>(count)});
    }
  };
  for (int rule = 0; rule < tasks::Rules::kCount; ++rule) {
    const auto batch = [&](int codec, int format) {
      const auto add_all = [&](bool staged) {
        for (int64_t i = 0; i < row_count; ++i) {
          if (groups[kernel_rows[i].group].rule != rule) continue;
          if (format_of(kernel_rows[i], rule) != format) continue;
          if (format < 0 || (kernel_rows[i].codec == codec && is_aligned(kernel_rows[i]) != staged)) add(i, staged);
        }
      };
      const int64_t begin = made_count();
      add_all(false);
      const int64_t staged = made_count();
      if (format >= 0) add_all(true);
      if (made_count() > begin) made.batches.push_back({rule, codec, format, begin, staged, made_count()});
    };
    for (int codec = 0; codec < tasks::Codecs::kCount; ++codec) {
      for (int format = 0; format < kAlignedFormatCount; ++format) batch(codec, format);
    }
    batch(0, -1);
  }
  return made;
}

}  // namespace shardopt
