// Log-prob and entropy of each token from the ranks' partials.
#include "common/logprob.h"
#include "cuda/device.cuh"
#include "cuda/launch.h"

namespace bapo {
namespace {

constexpr int kThreads = 128;

// Per token: combine_partials of common/logprob.h, in float64 and in rank order.
// Grid: one thread per token, blocks of kThreads. partials [P, T, 4], results [T].
__global__ void __launch_bounds__(kThreads)
    logprob_combine_kernel(const __grid_constant__ LogprobCombineParams params) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (token >= params.num_tokens) return;
  const TokenLogprob result = combine_partials(params.partials + 4 * token, params.num_ranks,
                                               4 * params.num_tokens, params.temperature);
  params.logprob[token] = result.logprob;
  params.entropy[token] = result.entropy;
  params.max[token] = result.max;
  params.log_sum[token] = result.log_sum;
}

}  // namespace
}  // namespace bapo

extern "C" int bapo_launch_logprob_combine(const bapo::LogprobCombineParams* params, void* stream) {
  if (params->num_tokens == 0) return cudaSuccess;
  return bapo::launch(bapo::logprob_combine_kernel,
                      bapo::ceil_divide(params->num_tokens, bapo::kThreads), bapo::kThreads, stream,
                      *params);
}
