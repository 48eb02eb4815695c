// Prints a digest of what the message kernels of one instruction set make of floats of every magnitude, for many
// lengths and chunks. The tensors end where the next page cannot be read.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "comm/cpu_call.h"

using namespace shardopt;

namespace {

// Bytes that end where a page that cannot be read begins.
class Guarded {
 public:
  explicit Guarded(size_t size) : size_(size) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    length_ = (size + page - 1) / page * page + page;
    memory_ = static_cast<uint8_t*>(mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(memory_ + length_ - page, page, PROT_NONE);
    data = memory_ + length_ - page - size;
  }
  ~Guarded() { munmap(memory_, length_); }
  uint8_t* data;
  size_t size_;

 private:
  uint8_t* memory_;
  size_t length_;
};

uint64_t state = 1;
uint32_t random_bits() {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<uint32_t>(state >> 32);
}

uint64_t digest(const uint8_t* data, size_t size, uint64_t found) {
  for (size_t i = 0; i < size; ++i) found = (found ^ data[i]) * 1099511628211ull;
  return found;
}

}  // namespace

int main() {
  const MessageKernels kernels = SHARDOPT_KERNELS::message_kernels();
  const int sizes[3] = {4, 2, 2};  // float32, bfloat16, float16, in the order of DType
  for (int dtype = 0; dtype < 3; ++dtype) {
    for (int64_t numel : {1, 15, 16, 127, 128, 129, 300, 1000, 4099}) {
      for (int64_t chunks : {1, 3}) {
        const int64_t chunk_numel = (numel + chunks - 1) / chunks;
        const size_t bytes = static_cast<size_t>(chunks * generic::chunk_bytes(chunk_numel));
        Guarded floats(static_cast<size_t>(numel) * sizes[dtype]), sum(static_cast<size_t>(chunk_numel) * sizes[dtype]);
        std::vector<uint8_t> room(bytes + 64);
        uint8_t* message = room.data() + (64 - reinterpret_cast<uintptr_t>(room.data()) % 64) % 64;
        std::memset(message, 0, bytes);
        for (int64_t i = 0; i < numel; ++i) {  // of any exponent, zeros, infinities and NaN among them
          uint32_t bits = random_bits();
          if (i % 7 == 0) bits &= 0x80000000u;
          if (i % 3) bits = (bits & 0x807fffffu) | (120 + i % 13) << 23;
          if (sizes[dtype] == 4) {
            std::memcpy(floats.data + 4 * i, &bits, 4);
          } else {
            const uint16_t half = static_cast<uint16_t>(bits >> 16);
            std::memcpy(floats.data + 2 * i, &half, 2);
          }
        }
        const int64_t blocks = chunks * generic::message_blocks(chunk_numel);
        const MessageCall encode{floats.data, message, numel, chunks, chunk_numel, 1, 1.0f, static_cast<DType>(dtype)};
        kernels.encode[dtype](encode, 0, blocks);
        uint64_t found = digest(message, bytes, 14695981039346656037ull);
        const MessageCall decode{sum.data,    message, chunk_numel, 1,
                                 chunk_numel, chunks,  0.5f,        static_cast<DType>(dtype)};
        kernels.decode[dtype](decode, 0, generic::message_blocks(chunk_numel));
        found = digest(sum.data, sum.size_, found);
        std::printf("%d %lld %lld %016llx\n", dtype, static_cast<long long>(numel), static_cast<long long>(chunks),
                    static_cast<unsigned long long>(found));
      }
    }
  }
}
