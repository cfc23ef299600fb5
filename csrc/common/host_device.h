// Macros for functions that host and device compile from the same text.
#pragma once

#if defined(__CUDACC__)
#define BAPO_HD __host__ __device__ __forceinline__
#else
// Always inlined, so that a caller built for AVX2 gets AVX2 code and no copy built for one
// instruction set can be picked by the linker for another.
#define BAPO_HD __attribute__((always_inline)) inline
#endif
