#include "threads/copies.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "threads/pool.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace shardopt {
namespace {

constexpr int64_t kPieceBytes = 1 << 20;

// Stores past the caches do not read the memory that they overwrite, which saves a third of the traffic.
void copy(char* to, const char* from, int64_t n) {
#if defined(__x86_64__)
  constexpr int64_t kStep = 4 * sizeof(__m128i);
  if (n >= 2 * kStep) {
    const int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) % sizeof(__m128i));
    std::memcpy(to, from, static_cast<size_t>(head));
    to += head, from += head, n -= head;
    for (; n >= kStep; to += kStep, from += kStep, n -= kStep) {
      __m128i words[4];
      std::memcpy(words, from, sizeof words);
      for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, words[i]);
    }
  }
#endif
  std::memcpy(to, from, static_cast<size_t>(n));
}

struct Work {
  const uint64_t* to;
  const uint64_t* from;
  const int64_t* nbytes;
  std::vector<int64_t> pieces;  // per range, the number of pieces up to its end
  std::atomic<int64_t> next{0};
};

void copy_pieces(void* context, int) {
  Work& work = *static_cast<Work*>(context);
  for (int64_t piece; (piece = work.next.fetch_add(1)) < work.pieces.back();) {
    const auto end = std::upper_bound(work.pieces.begin(), work.pieces.end(), piece);
    const int64_t range = end - work.pieces.begin();
    const int64_t begin = (piece - (range ? end[-1] : 0)) * kPieceBytes;
    copy(reinterpret_cast<char*>(work.to[range]) + begin, reinterpret_cast<const char*>(work.from[range]) + begin,
         std::min(kPieceBytes, work.nbytes[range] - begin));
  }
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace

void copy_ranges(const uint64_t* to, const uint64_t* from, const int64_t* nbytes, int64_t count, int threads) {
  if (!count) return;
  Work work{to, from, nbytes, {}};
  int64_t pieces = 0;
  for (int64_t i = 0; i < count; ++i) {
    pieces += (nbytes[i] + kPieceBytes - 1) / kPieceBytes;
    work.pieces.push_back(pieces);
  }
  run_on_threads(static_cast<int>(std::clamp<int64_t>(threads, 1, std::max<int64_t>(pieces, 1))), copy_pieces, &work);
}

}  // namespace shardopt
