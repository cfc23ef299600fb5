// Log-prob, entropy and divergence of each token from the ranks' partials.
#include "common/kl.h"
#include "cuda/device.cuh"
#include "cuda/launch.h"

namespace bapo {
namespace {

constexpr int kThreads = 128;

// Per token: combine_kl_partials of common/kl.h, in float64 and in rank order.
// Grid: one thread per token, blocks of kThreads. partials [P, T, 8], results [T].
__global__ void __launch_bounds__(kThreads)
    kl_combine_kernel(const __grid_constant__ KlCombineParams params) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (token >= params.num_tokens) return;
  write_token_kl(params, token);
}

}  // namespace
}  // namespace bapo

extern "C" int bapo_launch_kl_combine(const bapo::KlCombineParams* params, void* stream) {
  if (params->num_tokens == 0) return cudaSuccess;
  return bapo::launch(bapo::kl_combine_kernel,
                      bapo::ceil_divide(params->num_tokens, bapo::kThreads), bapo::kThreads, stream,
                      *params);
}
