// The policy loss with its sums and derivative, in one pass over the tokens.
#include "common/token_loss.h"
#include "cuda/device.cuh"
#include "cuda/launch.h"

namespace bapo {
namespace {

constexpr int kThreads = 256;
constexpr int kNumWarps = kThreads / kWarpSize;
constexpr int64_t kMaxBlocks = 512;

// A function of the number of tokens alone: on any device the same additions in the same order.
int64_t num_loss_blocks(int64_t num_tokens) {
  const int64_t wanted = ceil_divide(num_tokens, kThreads);
  return wanted < kMaxBlocks ? wanted : kMaxBlocks;
}

struct Bounds {
  float low;
  float high;
};

// Adds one token with mask 1 to the sums and returns its coefficient.
__device__ __forceinline__ float add_token(const PolicyLossParams& params, int64_t token,
                                           const Bounds& bounds, double (&sums)[kNumLossSums]) {
  const float logprob = params.logprob[token];
  const float behaviour = params.behaviour_logprob[token];
  const float advantage = params.advantage[token];
  sums[kSumTokens] += 1.0;
  if (!(is_finite(logprob) && is_finite(behaviour) && is_finite(advantage))) {
    sums[kSumNonFinite] += 1.0;
    return 0.0f;
  }
  const float weight = params.weight[token];
  const double entropy =
      params.entropy == nullptr ? 0.0 : static_cast<double>(params.entropy[token]);
  const TokenLoss loss =
      token_loss(logprob, behaviour, advantage, weight, bounds.low, bounds.high, params.dual_clip);
  sums[kSumPositive] += advantage > 0.0f ? 1.0 : 0.0;
  sums[kSumSigned] += advantage != 0.0f ? 1.0 : 0.0;
  sums[kSumPolicyLoss] += loss.loss;
  sums[kSumWeightedEntropy] += static_cast<double>(weight) * entropy;
  sums[kSumEntropy] += entropy;
  sums[kSumKl] += loss.kl;
  sums[kSumClippedHigh] += loss.high ? 1.0 : 0.0;
  sums[kSumClippedLow] += loss.low ? 1.0 : 0.0;
  sums[kSumClippedDual] += loss.dual ? 1.0 : 0.0;
  return loss.coefficient;
}

// coefficient[t] = d loss / d logprob, 0 for a token with mask 0 or values that are not finite;
// block_sums[b] = the LossSums of block b's tokens (common/token_loss.h), added in a fixed order.
// Grid: num_loss_blocks blocks of kThreads that stride over the tokens. Token arrays [T],
// block_sums [blocks, kNumLossSums].
__global__ void __launch_bounds__(kThreads)
    policy_loss_kernel(const __grid_constant__ PolicyLossParams params, double* block_sums) {
  __shared__ double warp_sums[kNumLossSums][kNumWarps];
  const Bounds bounds = {static_cast<float>(params.bounds[kBoundsLow]),
                         static_cast<float>(params.bounds[kBoundsHigh])};
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  double sums[kNumLossSums] = {};
  for (int64_t token = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       token < params.num_tokens; token += step) {
    params.coefficient[token] =
        params.mask[token] == 0.0f ? 0.0f : add_token(params, token, bounds, sums);
  }

#pragma unroll
  for (int index = 0; index < kNumLossSums; ++index) {
    const double sum = warp_sum(sums[index]);
    if (threadIdx.x % kWarpSize == 0) warp_sums[index][threadIdx.x / kWarpSize] = sum;
  }
  __syncthreads();
  if (threadIdx.x >= kNumLossSums) return;
  double sum = 0.0;
#pragma unroll
  for (int warp = 0; warp < kNumWarps; ++warp) sum += warp_sums[threadIdx.x][warp];
  block_sums[static_cast<int64_t>(blockIdx.x) * kNumLossSums + threadIdx.x] = sum;
}

// sums[i] = sum over blocks of block_sums[., i], added in a fixed order; zeros without blocks.
// Grid: one block, warp i for sum i. block_sums [num_blocks, kNumLossSums], sums [kNumLossSums].
__global__ void __launch_bounds__(kNumLossSums* kWarpSize)
    add_block_sums_kernel(const double* block_sums, int num_blocks, double* sums) {
  const int index = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  double sum = 0.0;
  for (int block = lane; block < num_blocks; block += kWarpSize) {
    sum += block_sums[block * kNumLossSums + index];
  }
  sum = warp_sum(sum);
  if (lane == 0) sums[index] = sum;
}

}  // namespace
}  // namespace bapo

extern "C" int64_t bapo_policy_loss_scratch_bytes(int64_t num_tokens) {
  return bapo::num_loss_blocks(num_tokens) * bapo::kNumLossSums *
         static_cast<int64_t>(sizeof(double));
}

extern "C" int bapo_launch_policy_loss(const bapo::PolicyLossParams* params, void* scratch,
                                       void* stream) {
  const int64_t num_blocks = bapo::num_loss_blocks(params->num_tokens);
  double* block_sums = static_cast<double*>(scratch);
  if (num_blocks > 0) {
    const cudaError_t error = bapo::launch(bapo::policy_loss_kernel, num_blocks, bapo::kThreads,
                                           stream, *params, block_sums);
    if (error != cudaSuccess) return error;
  }
  return bapo::launch(bapo::add_block_sums_kernel, 1, bapo::kNumLossSums * bapo::kWarpSize, stream,
                      block_sums, static_cast<int>(num_blocks), params->sums);
}
