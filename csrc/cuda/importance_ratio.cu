// The importance ratio of each token, with the bits that the contribution table uses.
#include "common/contribution.h"
#include "cuda/device.cuh"
#include "cuda/launch.h"

namespace bapo {
namespace {

constexpr int kThreads = 256;

// ratio[t] = float32(exp(clamp(logprob - behaviour_logprob, +-20))), NaN where one of the two is
// not finite (common/contribution.h).
// Grid: one thread per token, blocks of kThreads. Arrays [T].
__global__ void __launch_bounds__(kThreads)
    importance_ratio_kernel(const __grid_constant__ ImportanceRatioParams params) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (token >= params.num_tokens) return;
  params.ratio[token] =
      importance_ratio_or_nan(params.logprob[token], params.behaviour_logprob[token]);
}

}  // namespace
}  // namespace bapo

extern "C" int bapo_launch_importance_ratio(const bapo::ImportanceRatioParams* params,
                                            void* stream) {
  if (params->num_tokens == 0) return cudaSuccess;
  return bapo::launch(bapo::importance_ratio_kernel,
                      bapo::ceil_divide(params->num_tokens, bapo::kThreads), bapo::kThreads, stream,
                      *params);
}
