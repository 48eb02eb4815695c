// The namespace and qualifiers that let one header serve several instruction sets and the GPU.
//
// Every function that a kernel calls lives in `shardopt::SHARDOPT_TARGET`. Each translation unit of the step sets that
// name before its first include, so that no inline function is ever compiled under two sets of flags: the linker would
// keep one copy of such a function, perhaps the AVX-512 copy, and older CPUs would crash.
#pragma once

#include <cstdint>

#ifndef SHARDOPT_TARGET
#define SHARDOPT_TARGET generic
#endif

#if defined(__CUDACC__)
#define SHARDOPT_HD __host__ __device__ __forceinline__
#else
#define SHARDOPT_HD inline __attribute__((always_inline))
#endif

#define SHARDOPT_BEGIN_NAMESPACE \
  namespace shardopt {           \
  namespace SHARDOPT_TARGET {
#define SHARDOPT_END_NAMESPACE \
  }                            \
  }
