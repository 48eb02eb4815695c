#include <algorithm>

#include "step/cuda.h"

namespace shardopt {
namespace {

constexpr int64_t kTaskElements = 8192;

}  // namespace

CudaTasks make_cuda_tasks(const TensorEntry* entries, int64_t entry_count, const GroupEntry* groups) {
  CudaTasks made;
  int rules = 0;
  for (int64_t i = 0; i < entry_count; ++i) rules = std::max(rules, groups[entries[i].group].rule + 1);
  for (int rule = 0; rule < rules; ++rule) {
    const int64_t begin = static_cast<int64_t>(made.tasks.size());
    for (int64_t i = 0; i < entry_count; ++i) {
      const TensorEntry& entry = entries[i];
      if (groups[entry.group].rule != rule) continue;
      const int64_t blocks = entry.rows * ((entry.cols + entry.block_size - 1) / entry.block_size);
      const int64_t blocks_per_task = std::max<int64_t>(1, kTaskElements / entry.block_size);
      for (int64_t first = 0; first < blocks; first += blocks_per_task) {
        const int64_t count = std::min(blocks_per_task, blocks - first);
        made.tasks.push_back({first, static_cast<int32_t>(i), static_cast<int32_t>(count)});
      }
    }
    const int64_t end = static_cast<int64_t>(made.tasks.size());
    if (end > begin) made.batches.push_back({rule, begin, end});
  }
  return made;
}

}  // namespace shardopt
