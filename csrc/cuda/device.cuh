// Helpers shared by the kernels: launches, reductions over a warp or a block.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

namespace bapo {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Launches kernel(args...) on a grid of num_blocks; the limit of grid.x is 2^31 - 1 blocks.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int64_t num_blocks, int num_threads, void* stream,
                   const Arguments&... arguments) {
  if (num_blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks));
  config.blockDim = dim3(static_cast<unsigned>(num_threads));
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

inline int64_t ceil_divide(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

// Ignores NaN unless all are.
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  return value;
}

// The same bits in every lane: both partners of a step add the same two numbers.
template <typename Number>
__device__ __forceinline__ Number warp_sum(Number value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}

// Maximum over the block, for every thread. A second call may use the same scratch only if a
// barrier lies between this call's end and that call's start.
template <int num_warps>
__device__ __forceinline__ float block_max(float value, float (&scratch)[num_warps]) {
  value = warp_max(value);
  if (threadIdx.x % kWarpSize == 0) scratch[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  float result = scratch[0];
#pragma unroll
  for (int warp = 1; warp < num_warps; ++warp) result = fmaxf(result, scratch[warp]);
  return result;
}

// Sums over the block of each value, for thread 0, in the order of the warps.
template <int count, int num_warps>
__device__ __forceinline__ void block_sums(float (&values)[count],
                                           float (&scratch)[count][num_warps]) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    values[i] = warp_sum(values[i]);
    if (threadIdx.x % kWarpSize == 0) scratch[i][threadIdx.x / kWarpSize] = values[i];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int warp = 1; warp < num_warps; ++warp) {
#pragma unroll
    for (int i = 0; i < count; ++i) values[i] += scratch[i][warp];
  }
}

}  // namespace bapo
