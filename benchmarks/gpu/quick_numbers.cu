// Compares the square roots and reciprocals without guards (csrc/step/cuda_quick.h) with correctly rounded ones: all
// 2^24 significands of roots, all 2^23 of reciprocals, at the ends and in the middle of the exponents that they are
// for. Prints how many differ.
#define SHARDOPT_TARGET checked
#include <cuda_runtime.h>

#include <cstdio>

#include "step/cuda_quick.h"

using namespace shardopt::checked;

__global__ void compare(unsigned long long* wrong, int exponent, bool root) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;  // a significand; of roots also the exponent's parity
  const float x = __int_as_float(((exponent + static_cast<int>(i >> 23) + 127) << 23) | (i & 0x7fffff));
  const float quick = root ? square_root(Quick(x)).x : reciprocal(Quick(x)).x;
  const float exact = root ? __fsqrt_rn(x) : __frcp_rn(x);
  if (__float_as_int(quick) != __float_as_int(exact)) atomicAdd(wrong, 1ull);
}

int main() {
  unsigned long long *wrong = nullptr, found = 0, total = 0;
  if (cudaMalloc(&wrong, sizeof *wrong) != cudaSuccess) return 2;
  const int exponents[] = {-100, -99, -51, -50, -1, 0, 1, 60, 61, 100, 122};
  for (const bool root : {false, true}) {
    for (const int exponent : exponents) {
      if (cudaMemset(wrong, 0, sizeof *wrong) != cudaSuccess) return 2;
      compare<<<(root ? 1 << 24 : 1 << 23) / 256, 256>>>(wrong, exponent, root);
      if (cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost) != cudaSuccess) return 2;
      std::printf("%s at 2^%d: %llu differ\n", root ? "roots" : "reciprocals", exponent, found);
      total += found;
    }
  }
  return total == 0 ? 0 : 1;
}
