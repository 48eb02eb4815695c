// Bounds for the optimizers, of plain loops in place: AdamW on float32, and loops that hardly compute, whose time is
// the memory's. benchmarks/step_cpu.py compiles them: cc -O3 -march=native -ffast-math -fopenmp -shared -fPIC
#include <math.h>
#include <stddef.h>
#include <stdint.h>

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

// Reads parameter, gradient and two moments, writes all but the gradient: 28 bytes per element.
void move_float32(float* restrict param, const float* restrict gradient, float* restrict m, float* restrict v,
                  ptrdiff_t n, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
  for (ptrdiff_t i = 0; i < n; ++i) {
    const float g = gradient[i];
    m[i] += g;
    v[i] += g;
    param[i] += g;
  }
}

// The same with moments of a byte and three scales per block of 128 elements: 16.2 bytes per element.
void move_8bit(float* restrict param, const float* restrict gradient, uint8_t* restrict m, uint8_t* restrict v,
               float* restrict scales, ptrdiff_t n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (ptrdiff_t block = 0; block < n / 128; ++block) {
    const ptrdiff_t begin = 128 * block;
    for (ptrdiff_t i = begin; i < begin + 128; ++i) param[i] += gradient[i];
    for (ptrdiff_t i = begin; i < begin + 128; ++i) m[i] += 1;
    for (ptrdiff_t i = begin; i < begin + 128; ++i) v[i] += 1;
    for (ptrdiff_t i = 3 * block; i < 3 * block + 3; ++i) scales[i] += 1.0f;
  }
}
