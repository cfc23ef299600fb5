// Stands for CUDA's header of this name: the part that csrc/cuda uses, on the host.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>

#include "emulator.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
// Blocks run one after the other, so one copy serves all; a block finds what the last one left.
#define __shared__ static

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline uint4 __ldcs(const uint4* address) {
  emulator::require_aligned(address, alignof(uint4));
  return *address;
}
inline void __stcs(uint4* address, const uint4& value) {
  emulator::require_aligned(address, alignof(uint4));
  *address = value;
}

inline void __syncthreads() { emulator::block_barrier(); }
inline int __syncthreads_or(int predicate) { return emulator::block_barrier_or(predicate != 0); }

template <typename Number>
Number __shfl_xor_sync(unsigned mask, Number value, int lane_mask) {
  emulator::shuffle_xor(mask, &value, sizeof(Number), lane_mask);
  return value;
}

template <typename Number>
Number atomicAdd(Number* address, Number value) {
  const Number old = *address;
  *address = old + value;
  return old;
}
template <typename Number>
Number atomicExch(Number* address, Number value) {
  const Number old = *address;
  *address = value;
  return old;
}
template <typename Number>
Number atomicCAS(Number* address, Number expected, Number value) {
  const Number old = *address;
  if (old == expected) *address = value;
  return old;
}
template <typename Number>
Number atomicMin(Number* address, Number value) {
  const Number old = *address;
  if (value < old) *address = value;
  return old;
}

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719
};
using cudaStream_t = void*;

struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const std::tuple<Parameters...> copies(arguments...);
  const auto body = [&] { std::apply(kernel, copies); };
  return emulator::run_grid(config->gridDim, config->blockDim, body) ? cudaSuccess
                                                                     : cudaErrorLaunchFailure;
}

inline cudaError_t cudaMemsetAsync(void* address, int byte, size_t num_bytes, cudaStream_t) {
  std::memset(address, byte, num_bytes);
  return cudaSuccess;
}
inline cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = 0;
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t) { return emulator_last_failure(); }
