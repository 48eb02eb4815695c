// The step on CUDA: a warp per block, four elements per lane, the same rule and codec headers as on the CPU.
//
// Compile with: nvcc -std=c++17 -O3 --fmad=false -gencode arch=compute_80,code=sm_80 -I csrc -c csrc/step/cuda.cu
#define SHARDOPT_TARGET cuda
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "step/cuda.h"
#include "step/cuda_lane.h"
#include "step/instances.h"

SHARDOPT_BEGIN_NAMESPACE

constexpr int kWarp = 32;
constexpr int kChunk = kWarp * kLane;  // elements per warp and chunk
constexpr int kThreads = 256;
constexpr unsigned kAllLanes = 0xffffffffu;

// One block in the hands of one warp. A block of several chunks is computed anew in each pass: nothing is stored before
// the last one.
template <class Rule, class Codec>
class WarpStepper {
  static constexpr int kMoments = Rule::Kept::kCount;
  static constexpr int kUnsigned = Rule::Kept::kUnsigned;
  static constexpr bool kRelative = Codec::kRelative && kUnsigned >= 0;
  static constexpr bool kBlockwise = Codec::Signed::kScales > 0;
  using Code = typename Codec::Code;
  using Unsigned = typename Codec::Unsigned;
  using Signed = typename Codec::Signed;

 public:
  __device__ WarpStepper(const CudaCall& call, const TensorEntry& entry, const Rule& rule, int64_t row, int64_t block)
      : call_(call), entry_(entry), rule_(rule), group_(call.groups[entry.group]), table_(call.tables[entry.codec]) {
    const int64_t col = block * entry.block_size;
    const int64_t left = entry.cols - col;
    n_ = static_cast<int>(left < entry.block_size ? left : entry.block_size);
    offset_ = row * entry.row_stride + col;
    scale_index_ = row * entry.scales_row_stride + block;
    lane_ = static_cast<int>(threadIdx.x) % kWarp;
    gradient_scale_ = group_.gradient_scale;
    if (call.grad_scale) {
      gradient_scale_ = static_cast<float>(gradient_scale_ * (1.0 / static_cast<double>(*call.grad_scale)));
    }
  }

  __device__ void run() {
    const bool stores = !entry_.cut || call_.phase == Phase::kFinish;
    Extremes first[kMoments + 1] = {};
    if (kBlockwise) measure_first(first);
    if (kBlockwise && kRelative && !(entry_.cut && call_.phase == Phase::kStep)) measure_relative(first);
    if (stores) encode(first);
  }

 private:
  __device__ int chunks() const { return (n_ + kChunk - 1) / kChunk; }

  template <class Coder>
  __device__ float* scales(int moment) const {
    return reinterpret_cast<float*>(entry_.scales[moment]) + Coder::kScales * scale_index_;
  }

  __device__ Extremes* shared_extremes(int moment) const {
    return reinterpret_cast<Extremes*>(entry_.extremes[moment]) + scale_index_;
  }

  // Computes the lane's elements of a chunk, unless they are in registers already.
  __device__ void compute(int chunk) {
    if (chunk == computed_) return;
    computed_ = chunk;
    const int at = chunk * kChunk + lane_ * kLane;
    lane_n_ = n_ - at < 0 ? 0 : (n_ - at < kLane ? n_ - at : kLane);
    at_ = offset_ + at;
    float gradient[kLane];
    load_floats(param_, entry_.param, entry_.weight_format, at_, lane_n_);
    load_floats(gradient, entry_.gradient, entry_.gradient_dtype, at_, lane_n_);
    decode();
    const bool skips = group_.nonfinite == static_cast<int32_t>(NonFinite::kSkip);
    nonfinite_ = 0;
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      const float g = gradient[i] * gradient_scale_;
      float param = param_[i], root = root_[i], moment[kMoments + 1] = {};
#pragma unroll
      for (int k = 0; k < kMoments; ++k) moment[k] = moment_[k][i];
      rule_.update(param, g, moment, root);
      if (skips && is_lost<kMoments>(g, param, moment)) {
        ++nonfinite_;
        continue;
      }
      param_[i] = param;
      root_[i] = root;
#pragma unroll
      for (int k = 0; k < kMoments; ++k) moment_[k][i] = moment[k];
    }
  }

  __device__ void decode() {
    if constexpr (kUnsigned >= 0) {
      const Unsigned coder(scales<Unsigned>(kUnsigned), table_);
      const Vector<Code> codes = load_lane(reinterpret_cast<const Code*>(entry_.codes[kUnsigned]) + at_, lane_n_);
#pragma unroll
      for (int i = 0; i < kLane; ++i) {
        root_[i] = i < lane_n_ ? coder.decode(as_number(codes.x[i])) : 0.0f;
        moment_[kUnsigned][i] = Codec::kRoot ? root_[i] * root_[i] : root_[i];
      }
    }
#pragma unroll
    for (int k = 0; k < kMoments; ++k) {
      if (k == kUnsigned) continue;
      const Signed coder(scales<Signed>(k), table_);
      const Vector<Code> codes = load_lane(reinterpret_cast<const Code*>(entry_.codes[k]) + at_, lane_n_);
#pragma unroll
      for (int i = 0; i < kLane; ++i) {
        const float x = i < lane_n_ ? coder.decode(as_number(codes.x[i])) : 0.0f;
        moment_[k][i] = kRelative ? x * root_[i] : x;
      }
    }
  }

  __device__ float unsigned_value(int i) const {
    return Codec::kRoot ? root_[i] : moment_[kMoments > 1 ? kUnsigned : 0][i];
  }

  __device__ static void widen(Extremes& e, float x) {
    const int32_t b = magnitude_bits(x);
    e.high = max_int(e.high, b);
    e.low = max_int(e.low, b == 0 ? 0 : kInfinityBits - b);
  }

  __device__ static Extremes over_warp(const Extremes& e) {
    return {__reduce_max_sync(kAllLanes, e.high), __reduce_max_sync(kAllLanes, e.low)};
  }

  // The extremes of everything but relative moments: measured, or after the exchange those of all owners of a cut
  // block.
  __device__ void measure_first(Extremes* found) {
    if (entry_.cut && call_.phase != Phase::kStep) {
#pragma unroll
      for (int k = 0; k < kMoments; ++k) found[k] = *shared_extremes(k);
      return;
    }
    for (int chunk = 0; chunk < chunks(); ++chunk) {
      compute(chunk);
#pragma unroll
      for (int k = 0; k < kMoments; ++k) {
        if (kRelative && k != kUnsigned) continue;
#pragma unroll
        for (int i = 0; i < kLane; ++i) {
          if (i < lane_n_) widen(found[k], k == kUnsigned ? unsigned_value(i) : moment_[k][i]);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kMoments; ++k) {
      found[k] = over_warp(found[k]);
      if (entry_.cut && lane_ == 0) *shared_extremes(k) = found[k];
    }
  }

  // The lane's signed moment in units of the root as it will be decoded.
  __device__ float relative(const Unsigned& coder, int k, int i) const {
    const float unit = coder.decode(coder.encode(root_[i]));
    return unit > 0.0f ? moment_[k][i] / unit : 0.0f;
  }

  __device__ void measure_relative(Extremes* found) {
    if (entry_.cut && call_.phase != Phase::kRelative) return;
    float scale[Unsigned::kScales + 1] = {};
    Unsigned::measure(found[kUnsigned >= 0 ? kUnsigned : 0], scale);
    const Unsigned coder(scale, table_);
    for (int chunk = 0; chunk < chunks(); ++chunk) {
      compute(chunk);
#pragma unroll
      for (int k = 0; k < kMoments; ++k) {
        if (k == kUnsigned) continue;
#pragma unroll
        for (int i = 0; i < kLane; ++i) {
          if (i < lane_n_) widen(found[k], relative(coder, k, i));
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kMoments; ++k) {
      if (k == kUnsigned) continue;
      found[k] = over_warp(found[k]);
      if (entry_.cut && lane_ == 0) *shared_extremes(k) = found[k];
    }
  }

  __device__ void encode(const Extremes* extremes) {
    float unsigned_scale[Unsigned::kScales + 1] = {};
    if constexpr (kUnsigned >= 0) Unsigned::measure(extremes[kUnsigned], unsigned_scale);
    const Unsigned unsigned_coder(unsigned_scale, table_);
    int counted = 0;
    for (int chunk = 0; chunk < chunks(); ++chunk) {
      compute(chunk);
      counted += nonfinite_;
      store_floats(entry_.param, param_, entry_.weight_format, at_, lane_n_);
#pragma unroll
      for (int k = 0; k < kMoments; ++k) {
        Vector<Code> codes;
        if (k == kUnsigned) {
#pragma unroll
          for (int i = 0; i < kLane; ++i) codes.x[i] = static_cast<Code>(unsigned_coder.encode(unsigned_value(i)));
        } else {
          float scale[Signed::kScales + 1] = {};
          Signed::measure(extremes[k], scale);
          const Signed coder(scale, table_);
#pragma unroll
          for (int i = 0; i < kLane; ++i) {
            codes.x[i] = static_cast<Code>(coder.encode(kRelative ? relative(unsigned_coder, k, i) : moment_[k][i]));
          }
        }
        store_lane(reinterpret_cast<Code*>(entry_.codes[k]) + at_, codes, lane_n_);
      }
    }
    __syncwarp();  // every lane has read the old scales
    if (lane_ == 0) store_scales(extremes);
    counted = __reduce_add_sync(kAllLanes, counted);
    if (lane_ == 0 && counted) atomicAdd(call_.nonfinite, static_cast<unsigned long long>(counted));
  }

  __device__ void store_scales(const Extremes* extremes) {
#pragma unroll
    for (int k = 0; k < kMoments; ++k) {
      if (k == kUnsigned) {
        float scale[Unsigned::kScales + 1] = {};
        Unsigned::measure(extremes[k], scale);
        for (int i = 0; i < Unsigned::kScales; ++i) scales<Unsigned>(k)[i] = scale[i];
      } else {
        float scale[Signed::kScales + 1] = {};
        Signed::measure(extremes[k], scale);
        for (int i = 0; i < Signed::kScales; ++i) scales<Signed>(k)[i] = scale[i];
      }
    }
  }

  const CudaCall& call_;
  const TensorEntry& entry_;
  const Rule& rule_;
  const GroupEntry& group_;
  const float* table_;
  int64_t offset_, scale_index_, at_ = 0;
  int n_, lane_, lane_n_ = 0, computed_ = -1, nonfinite_ = 0;
  float gradient_scale_;
  float param_[kLane], root_[kLane], moment_[kMoments + 1][kLane];
};

__device__ inline bool is_off(const CudaCall& call) { return call.found_inf && *call.found_inf != 0.0f; }

__global__ void count_steps(CudaCall call) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < call.step_count && !is_off(call)) *call.steps[i] += 1.0f;
}

template <class Rule>
__global__ void make_rules(CudaCall call, CudaBatch batch) {
  static_assert(sizeof(Rule) <= kMaxRuleBytes, "raise kMaxRuleBytes");
  const int64_t i = batch.begin + blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= batch.end || is_off(call)) return;
  const TensorEntry& entry = call.entries[i];
  const Rule rule = Rule::make(call.groups[entry.group].hyper, *reinterpret_cast<const float*>(entry.step));
  *reinterpret_cast<Rule*>(static_cast<char*>(call.rules) + i * kMaxRuleBytes) = rule;
}

template <class Rule, class Codec>
__global__ void __launch_bounds__(kThreads) step_blocks(CudaCall call, CudaBatch batch) {
  if (is_off(call)) return;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * blockDim.x / kWarp;
  const int64_t first = call.first_blocks[batch.begin];
  int64_t i = batch.begin;
  for (int64_t b = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) / kWarp; b < batch.blocks;
       b += warps) {
    int64_t low = i, high = batch.end;  // the entry of block b: the last one that starts at or before it
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (call.first_blocks[middle] <= first + b ? low : high) = middle;
    }
    i = low;
    const TensorEntry& entry = call.entries[i];
    if (call.phase != Phase::kStep && !entry.cut) continue;
    const int64_t blocks_per_row = (entry.cols + entry.block_size - 1) / entry.block_size;
    const int64_t at = first + b - call.first_blocks[i];
    const Rule& rule = *reinterpret_cast<const Rule*>(static_cast<const char*>(call.rules) + i * kMaxRuleBytes);
    WarpStepper<Rule, Codec>(call, entry, rule, at / blocks_per_row, at % blocks_per_row).run();
  }
}

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

template <class Rule, class Codec>
void launch(const CudaCall& call, const CudaBatch& batch, cudaStream_t stream) {
  int device = 0, processors = 0, per_processor = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, step_blocks<Rule, Codec>, kThreads, 0),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  const int64_t wanted = (batch.blocks * kWarp + kThreads - 1) / kThreads;
  const int64_t resident = static_cast<int64_t>(processors) * per_processor;
  const int grid = static_cast<int>(wanted < resident ? wanted : resident);
  step_blocks<Rule, Codec><<<grid, kThreads, 0, stream>>>(call, batch);
  check(cudaGetLastError(), "the step's kernel");
}

template <class Rule>
void launch_make_rules(const CudaCall& call, const CudaBatch& batch, cudaStream_t stream) {
  const int64_t count = batch.end - batch.begin;
  make_rules<Rule><<<static_cast<int>((count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(call, batch);
  check(cudaGetLastError(), "the rules' kernel");
}

using Launch = void (*)(const CudaCall&, const CudaBatch&, cudaStream_t);

template <class Codec, class... Rule>
Launch launch_of_rule(int rule, List<Rule...>) {
  const Launch launches[] = {launch<Rule, Codec>...};
  return launches[rule];
}

template <class... Codec>
Launch launch_of(const CudaBatch& batch, List<Codec...>) {
  const Launch launches[] = {launch_of_rule<Codec>(batch.rule, Rules{})...};
  return launches[batch.codec];
}

template <class... Rule>
Launch prepare_of(int rule, List<Rule...>) {
  const Launch launches[] = {launch_make_rules<Rule>...};
  return launches[rule];
}

SHARDOPT_END_NAMESPACE

namespace shardopt {

void count_steps_cuda(const CudaCall& call, void* stream) {
  if (call.step_count == 0) return;
  const int grid = static_cast<int>((call.step_count + cuda::kThreads - 1) / cuda::kThreads);
  cuda::count_steps<<<grid, cuda::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(call);
  cuda::check(cudaGetLastError(), "the step counts' kernel");
}

void prepare_cuda(const CudaCall& call, const CudaBatch& batch, void* stream) {
  if (batch.begin == batch.end) return;
  cuda::prepare_of(batch.rule, cuda::Rules{})(call, batch, static_cast<cudaStream_t>(stream));
}

void step_cuda(const CudaCall& call, const CudaBatch& batch, void* stream) {
  if (batch.blocks == 0) return;
  cuda::launch_of(batch, cuda::Codecs{})(call, batch, static_cast<cudaStream_t>(stream));
}

int cuda_device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace shardopt
