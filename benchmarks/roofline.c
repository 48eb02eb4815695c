// AdamW in place on float32 and nothing else, as a bound for the optimizers: what the memory, and the compiler on its own,
// let a plain loop reach. benchmarks/step_cpu.py compiles it: cc -O3 -march=native -ffast-math -fopenmp -shared -fPIC
#include <math.h>
#include <stddef.h>

void adamw(float* restrict param, const float* restrict gradient, float* restrict m, float* restrict v, ptrdiff_t n,
           int threads, float lr, float beta1, float beta2, float eps, float decay, float correction1,
           float root_correction2) {
  const float step_size = lr / correction1, keep = 1.0f - lr * decay;
#pragma omp parallel for simd num_threads(threads) schedule(static)
  for (ptrdiff_t i = 0; i < n; ++i) {
    const float g = gradient[i];
    m[i] += (1.0f - beta1) * (g - m[i]);
    v[i] = beta2 * v[i] + (1.0f - beta2) * g * g;
    param[i] = keep * param[i] - step_size * m[i] / (sqrtf(v[i]) / root_correction2 + eps);
  }
}
