// Steps random parameters with the kernels of the instruction set SHARDOPT_KERNELS and prints a digest of all that
// they leave behind for each rule, codec, weight format and shape: the same on all processors. A page that cannot be
// read follows each buffer, so that the program dies of whatever is read or written beyond.
//
//   digests TABLES    a file with the codecs' tables, in order: an int64 count, and so many floats
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "step/cpu_targets.h"
#include "step/instances.h"

using namespace shardopt;

namespace {

struct Shape {
  int64_t rows, cols;
  int32_t block_size;
  bool cut;  // one cut block per row
};
const Shape kShapes[] = {
    {9, 128, 128, false}, {3, 1000, 128, false}, {5, 448, 128, false}, {6, 257, 128, false},  {7, 130, 128, false},
    {9, 33, 128, false},  {5, 7, 128, false},    {3, 70, 32, false},   {2, 300, 4096, false}, {5, 33, 128, true},
    {1, 48, 128, false},  {1, 16, 16, false},
};

struct Format {
  WeightFormat weight;
  DType dtype, gradient;
  size_t bytes, low_bytes, gradient_bytes;
};
constexpr DType kSingle = DType::kFloat32, kBrain = DType::kBFloat16, kHalf = DType::kFloat16;
const Format kFormats[] = {
    {WeightFormat::kFloat32, kSingle, kSingle, 4, 0, 4},
    {WeightFormat::kBFloat16, kBrain, kBrain, 2, 0, 2},
    {WeightFormat::kFloat16, kHalf, kHalf, 2, 0, 2},
    {WeightFormat::kBFloat16, kBrain, kSingle, 2, 0, 4},
    {WeightFormat::kBFloat16Plus8, kBrain, kBrain, 2, 1, 2},
    {WeightFormat::kBFloat16Plus16, kBrain, kBrain, 2, 2, 2},
    {WeightFormat::kFloat16Plus8, kHalf, kHalf, 2, 1, 2},
    {WeightFormat::kFloat16Plus16, kHalf, kHalf, 2, 2, 2},
    {WeightFormat::kBFloat16Stochastic, kBrain, kBrain, 2, 0, 2},
};

// Hyper-parameters that are not 0.9.
const std::map<std::string, double> kHyper = {
    {"lr", 1e-3}, {"beta2", 0.99}, {"beta3", 0.999}, {"eps", 1e-8}, {"dampening", 0.1}, {"nesterov", 1.0},
    {"alpha_steps", 3.0}, {"beta3_steps", 3.0}, {"log_beta1", -0.105}, {"log_beta3", -0.001}, {"past_steps", 1.0},
    {"least_variance", 0.001}, {"no_prox", 0.0}, {"d", 1e-2}, {"d0", 1e-6}, {"bias_correction", 1.0},
    {"safeguard_warmup", 0.0}, {"trust_coefficient", 0.1}, {"cautious", 1.0}, {"cautious_weight_decay", 1.0},
    {"coupled_decay", 0.01}, {"decoupled_decay", 0.02}, {"weight_decay", 0.02}, {"lr_decay", 0.1},
};

// How a moment of a kind is coded in a state of a codec: bytes of a code, scales per block, and the code of zero.
struct Coding {
  size_t code_bytes;
  int scales, zero;
};

template <class Codec>
constexpr Coding coding_in(generic::MomentKind kind) {
  const bool is_unsigned = generic::is_unsigned(kind);
  return {sizeof(typename Codec::Code), is_unsigned ? Codec::Unsigned::kScales : Codec::Signed::kScales,
          is_unsigned ? 0 : Codec::Signed::kZero};
}

template <class Codec>
constexpr Coding coding_of(generic::MomentKind kind) {
  if (kind == generic::MomentKind::kWide) return coding_in<generic::WideCodec<Codec>>(kind);
  if (kind == generic::MomentKind::kExact) return coding_in<generic::Float32>(kind);
  return coding_in<Codec>(kind);
}

// Writes a random number from 2^-20 (float16: 2^-14) to 1. Some gradients are zero, some too large for a moment, NaN or
// infinite.
void put_random(char* to, uint64_t& state, DType dtype, bool is_gradient) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  const bool is_half = dtype == DType::kFloat16, is_single = dtype == DType::kFloat32;
  const int mantissa_bits = is_single ? 23 : is_half ? 10 : 7;
  const uint32_t largest = is_half ? 31 : 255;
  uint32_t exponent = largest / 2 - 1 - state % (is_half ? 14 : 20);
  uint32_t mantissa = state >> 32 & ((1u << mantissa_bits) - 1);
  if (is_gradient && state % 16 == 0) exponent = mantissa = 0;
  if (is_gradient && state % 997 == 1) {
    exponent = largest - (state >> 20 & 1);
    mantissa &= state >> 21 & 1;
  }
  const uint32_t sign = state >> 63;
  const uint32_t bits = (sign << (is_single ? 31 : 15)) | exponent << mantissa_bits | mantissa;
  std::memcpy(to, &bits, is_single ? 4 : 2);
}

// Zeros, right before a page that cannot be read.
class Buffer {
 public:
  void make(size_t size) {
    size_ = size;
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t used = (size + page - 1) / page * page;
    mapped_ = used + page;
    begin_ = static_cast<char*>(mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (begin_ == MAP_FAILED || mprotect(begin_ + used, page, PROT_NONE) != 0) std::abort();
    data_ = begin_ + used - size;
  }
  ~Buffer() {
    if (begin_) munmap(begin_, mapped_);
  }

  char* data() const { return data_; }
  size_t size() const { return size_; }
  uint64_t address() const { return reinterpret_cast<uint64_t>(data_); }

 private:
  char *begin_ = nullptr, *data_ = nullptr;
  size_t mapped_ = 0, size_ = 0;
};

void add(uint64_t& digest, const Buffer& bytes) {
  for (size_t i = 0; i < bytes.size(); ++i)
    digest = (digest ^ static_cast<unsigned char>(bytes.data()[i])) * 1099511628211ull;
}

template <class Rule, class Codec>
void run(int rule, int codec, const std::vector<const float*>& tables) {
  constexpr int kMoments = Rule::Kept::kCount;
  for (const Format& format : kFormats) {
    for (const Shape& shape : kShapes) {
      const auto n = static_cast<size_t>(shape.rows * shape.cols);
      const auto blocks = static_cast<size_t>((shape.cols + shape.block_size - 1) / shape.block_size * shape.rows);
      uint64_t random = 88172645463325252ull;
      Buffer param, low_bits, gradient, sums, codes[kMoments + 1], scales[kMoments + 1], extremes[kMoments + 1];
      param.make(n * format.bytes);
      low_bits.make(n * format.low_bytes);
      gradient.make(n * format.gradient_bytes);
      sums.make(generic::kSumsOf<Rule> * sizeof(ExactSum));
      for (size_t i = 0; i < n; ++i) put_random(param.data() + i * format.bytes, random, format.dtype, false);
      KernelRow kernel_row{};
      float step = 0.0f;
      kernel_row.param = param.address();
      kernel_row.gradient = gradient.address();
      kernel_row.step = reinterpret_cast<uint64_t>(&step);
      kernel_row.low_bits = low_bits.address();
      for (int k = 0; k < kMoments; ++k) {
        const Coding coding = coding_of<Codec>(Rule::Kept::kKinds[k]);
        const int shared = generic::kSharesCodes<Codec> ? 0 : k;
        if (shared == k) codes[k].make(n * coding.code_bytes);
        std::memset(codes[shared].data(), coding.zero, codes[shared].size());  // zero bytes, where a code has several
        scales[k].make(blocks * sizeof(float) * static_cast<size_t>(coding.scales));
        extremes[k].make(blocks * sizeof(Extremes));
        kernel_row.codes[k] = codes[shared].address();
        kernel_row.scales[k] = scales[k].address();
        kernel_row.extremes[k] = extremes[k].address();
      }
      kernel_row.sums = sums.size() > 0 ? sums.address() : 0;
      kernel_row.numel = static_cast<double>(n);
      kernel_row.rows = shape.rows;
      kernel_row.cols = kernel_row.row_stride = kernel_row.global_row_numel = shape.cols;
      kernel_row.scales_row_stride = static_cast<int64_t>(blocks) / shape.rows;
      kernel_row.noise_key = 0x123456789abcdef;
      kernel_row.block_size = shape.block_size;
      kernel_row.weight_format = static_cast<int32_t>(format.weight);
      kernel_row.gradient_dtype = static_cast<int32_t>(format.gradient);
      kernel_row.codec = codec;
      kernel_row.cut = shape.cut;
      GroupRow group{};
      int h = 0;
      for (const char* name : Rule::kHyper) group.hyper[h++] = kHyper.count(name) ? kHyper.at(name) : 0.9;
      group.gradient_scale = 1.0f;
      group.rule = rule;
      const StepCall call{&kernel_row, &group, tables.data(), Phase::kStep};
      int64_t skipped = 0;
      uint64_t digest = 14695981039346656037ull;
      for (int steps = 0; steps < 4; ++steps) {
        for (size_t i = 0; i < n; ++i)
          put_random(gradient.data() + i * format.gradient_bytes, random, format.gradient, true);
        std::memset(sums.data(), 0, sums.size());
        for (const Phase phase : {Phase::kSums, Phase::kStep, Phase::kRelative, Phase::kFinish}) {
          if (phase == Phase::kSums && sums.size() == 0) continue;
          if (phase == Phase::kStep) step += 1.0f;
          StepCall now = call;
          now.phase = phase;
          skipped += SHARDOPT_KERNELS::cpu_kernel(codec, rule)(now, kernel_row, 0, static_cast<int64_t>(blocks));
        }
        add(digest, param);
        add(digest, low_bits);
        for (int k = 0; k < kMoments; ++k) {
          add(digest, codes[k]);
          add(digest, scales[k]);
        }
      }
      std::printf("%s %s weights %d gradients %d, %lld rows of %lld in blocks of %d%s: %016llx, %lld skipped\n",
                  Rule::kName, Codec::kName, kernel_row.weight_format, kernel_row.gradient_dtype,
                  static_cast<long long>(shape.rows), static_cast<long long>(shape.cols), shape.block_size,
                  shape.cut ? ", cut" : "", static_cast<unsigned long long>(digest), static_cast<long long>(skipped));
    }
  }
}

template <class Rule, class... Codec>
void run_codecs(int rule, const std::vector<const float*>& tables, generic::List<Codec...>) {
  int codec = 0;
  const auto run_it = [&](auto run_codec, bool exists) {
    if (exists) run_codec(rule, codec, tables);
    ++codec;
  };
  (run_it(run<Rule, Codec>, !generic::kSharesCodes<Codec> || generic::may_share_codes<Rule>()), ...);
}

template <class... Rule>
void run_rules(const std::vector<const float*>& tables, generic::List<Rule...>) {
  int rule = 0;
  (run_codecs<Rule>(rule++, tables, generic::Codecs{}), ...);
}

}  // namespace

int main(int count, char** arguments) {
  FILE* file = count == 2 ? std::fopen(arguments[1], "rb") : nullptr;
  if (!file) return std::fprintf(stderr, "usage: digests TABLES\n"), 2;
  std::vector<std::vector<float>> tables(generic::Codecs::kCount);
  std::vector<const float*> addresses;
  for (auto& table : tables) {
    int64_t numel = 0;
    if (std::fread(&numel, sizeof numel, 1, file) != 1) return 2;
    table.resize(static_cast<size_t>(numel));
    if (std::fread(table.data(), sizeof(float), table.size(), file) != table.size()) return 2;
    addresses.push_back(table.data());
  }
  std::fclose(file);
  run_rules(addresses, generic::Rules{});
}
