// Prints a digest of what the message kernels of one instruction set make of floats of every magnitude, for many
// lengths and chunks. The tensors end where the next page cannot be read.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "comm/cpu.h"

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
    for (int64_t row_numel : {1, 15, 16, 127, 128, 129, 300, 1000, 4099}) {
      for (int64_t chunks : {1, 3}) {
        for (int64_t is_coded : {0, 1}) {
          const int64_t rows = is_coded ? 2 : 1, numel = rows * row_numel;
          const int64_t bytes = is_coded ? rows * generic::row_bytes(row_numel) : generic::aligned_bytes(4 * numel);
          const MessagePart part{0, 0, 0, row_numel, is_coded};
          const MessageLayout layout{&part, 1, rows * generic::message_blocks(row_numel), numel, bytes};
          Guarded floats(static_cast<size_t>(chunks * numel) * sizes[dtype]), sum(static_cast<size_t>(numel) * 4),
              mean(static_cast<size_t>(numel) * sizes[dtype]);
          std::vector<uint8_t> room(static_cast<size_t>(chunks * bytes) + 64);
          uint8_t* message = room.data() + (64 - reinterpret_cast<uintptr_t>(room.data()) % 64) % 64;
          std::memset(message, 0, static_cast<size_t>(chunks * bytes));
          for (int64_t i = 0; i < chunks * numel; ++i) {  // of any exponent, zeros, infinities and NaN among them
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
          const EncodeCall encode{layout, floats.data, message, chunks, static_cast<DType>(dtype)};
          kernels.encode[dtype](encode, 0, chunks * layout.blocks);
          uint64_t found = digest(message, static_cast<size_t>(chunks * bytes), 14695981039346656037ull);
          SumCall call{};  // the message's terms, to a sum; and floats as they are, to their mean
          call.layout = layout;
          call.message = message;
          call.terms = 1;
          call.left = 1;
          call.out[0] = reinterpret_cast<float*>(sum.data);
          kernels.sum[0](call, 0, layout.blocks);
          found = digest(sum.data, sum.size_, found);
          if (!is_coded) call.layout.bytes = numel * sizes[dtype];
          if (!is_coded) call.message = floats.data;
          call.raw = is_coded ? DType::kFloat32 : static_cast<DType>(dtype);
          call.terms = chunks;
          call.first = call.taken = 1;
          call.in[0] = reinterpret_cast<const float*>(sum.data);
          call.mean = mean.data;
          call.divisor = 3.0f;
          call.dtype = static_cast<DType>(dtype);
          kernels.sum[static_cast<int>(call.raw)](call, 0, layout.blocks);
          found = digest(mean.data, mean.size_, found);
          std::printf("%d %lld %lld %lld %016llx\n", dtype, static_cast<long long>(row_numel),
                      static_cast<long long>(chunks), static_cast<long long>(is_coded),
                      static_cast<unsigned long long>(found));
        }
      }
    }
  }
}
