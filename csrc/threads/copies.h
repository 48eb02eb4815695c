// Copies of many ranges of memory at once.
#pragma once

#include <cstdint>

namespace shardopt {

// Copies nbytes[i] bytes from from[i] to to[i] for each i, on several threads, past the caches: for copies that are not
// soon read again. The ranges do not overlap.
void copy_ranges(const uint64_t* to, const uint64_t* from, const int64_t* nbytes, int64_t count, int threads);

}  // namespace shardopt
