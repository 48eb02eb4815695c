#define SHARDOPT_TARGET tasks
#include <algorithm>

#include "step/cuda.h"
#include "step/cuda_chunk.h"
#include "step/instances.h"

namespace shardopt {
namespace {

// Fewer per task where a step is short, so that the last tasks to end do not keep most of the device waiting.
int64_t task_elements(int64_t elements) {
  constexpr int64_t kMany = 500'000'000, kSome = 50'000'000, kMost = kMaxTaskBlocks * kAlignedBlock;
  return elements >= kMany ? kMost : elements >= kSome ? kMost / 2 : kMost / 4;
}

// Whether a rule and a blockwise codec have kernels of their own.
template <class Codec, class... Rule>
bool has_kernels(int rule, tasks::List<Rule...>) {
  constexpr bool has[] = {(Codec::Signed::kScales > 0 && tasks::is_usual<Rule, Codec>())...};
  return has[rule];
}
template <class... Codec>
bool has_kernels(int rule, int codec, tasks::List<Codec...>) {
  const bool has[] = {has_kernels<Codec>(rule, tasks::Rules{})...};
  return has[codec];
}

// The entry's format in kAlignedFormats if its blocks have kernels of their own; -1 otherwise.
int format_of(const KernelRow& entry, int rule) {
  if (entry.cut || entry.block_size != kAlignedBlock || entry.rows == 0 || entry.cols == 0) return -1;
  if (!has_kernels(rule, entry.codec, tasks::Codecs{})) return -1;
  // Short blocks that do not lie one after the other would be staged one by one.
  if (entry.row_stride != entry.cols && entry.rows > 1 && entry.cols < kAlignedBlock) return -1;
  for (int i = 0; i < kAlignedFormatCount; ++i) {
    if (entry.weight_format == static_cast<int32_t>(kAlignedFormats[i].weight) &&
        entry.gradient_dtype == static_cast<int32_t>(kAlignedFormats[i].gradient))
      return i;
  }
  return -1;
}

// Whether the entry is whole blocks, one after the other, and begins where vectors may. Addresses may change from step
// to step: the kernels look at them again.
bool is_aligned(const KernelRow& entry) {
  const bool contiguous = entry.rows == 1 || (entry.row_stride == entry.cols && entry.global_row_numel == entry.cols &&
                                              entry.scales_row_stride * kAlignedBlock == entry.cols);
  const uint64_t codes = entry.codes[0] | entry.codes[1], scales = entry.scales[0] | entry.scales[1];
  return contiguous && entry.cols % kAlignedBlock == 0 && (entry.param | entry.gradient | entry.low_bits) % 16 == 0 &&
         codes % 8 == 0 && scales % 8 == 0;
}

// Whole chunks and, where a task has room for some, whole rows.
int64_t staged_task_blocks(const KernelRow& entry, int64_t elements) {
  const tasks::RowShape shape(entry);
  const int64_t chunk = shape.chunk_blocks();
  const int64_t chunk_elements = shape.rows > 0 ? shape.rows * entry.cols : chunk * kAlignedBlock;
  const int64_t chunks = std::clamp<int64_t>(elements / chunk_elements, 1, tasks::kTaskChunks);
  if (shape.rows > 0) return chunks * chunk;
  const int64_t blocks = chunks * chunk;
  return blocks > shape.blocks ? blocks / shape.blocks * shape.blocks : blocks;
}

}  // namespace

CudaTasks make_cuda_tasks(const KernelRow* entries, int64_t entry_count, const GroupEntry* groups, bool aligned) {
  CudaTasks made;
  int64_t elements = 0;
  for (int64_t i = 0; i < entry_count; ++i) elements += entries[i].rows * entries[i].cols;
  const int64_t per_task = task_elements(elements);
  const auto made_count = [&] { return static_cast<int64_t>(made.tasks.size()); };
  const auto add = [&](int64_t i, bool staged) {
    const KernelRow& entry = entries[i];
    const int64_t blocks = entry.rows * ((entry.cols + entry.block_size - 1) / entry.block_size);
    const int64_t blocks_per_task =
        staged ? staged_task_blocks(entry, per_task) : std::max<int64_t>(1, per_task / entry.block_size);
    for (int64_t first = 0; first < blocks; first += blocks_per_task) {
      const int64_t count = std::min(blocks_per_task, blocks - first);
      made.tasks.push_back({first, static_cast<int32_t>(i), static_cast<int32_t>(count)});
    }
  };
  for (int rule = 0; rule < tasks::Rules::kCount; ++rule) {
    const auto batch = [&](int codec, int format) {
      const auto add_all = [&](bool staged) {
        for (int64_t i = 0; i < entry_count; ++i) {
          if (groups[entries[i].group].rule != rule) continue;
          if ((aligned ? format_of(entries[i], rule) : -1) != format) continue;
          if (format < 0 || (entries[i].codec == codec && is_aligned(entries[i]) != staged)) add(i, staged);
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
