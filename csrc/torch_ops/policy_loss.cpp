// policy_loss: sums of the loss and its derivative by each log-prob. T tokens.

#include "cpu/policy_loss.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>
#include <vector>

#include "common/logprob.h"
#include "common/token_loss.h"
#include "torch_ops/checks.h"
#include "torch_ops/cuda_launch.h"

namespace bapo {
namespace {

using Results = std::tuple<Tensor, Tensor>;

struct Call {
  Results results;  // sums [kNumLossSums], coefficient [T]
  PolicyLossParams params;
};

Call prepare(const Tensor& logprob, const OptionalTensor& entropy, const Tensor& behaviour_logprob,
             const Tensor& advantage, const Tensor& mask, const Tensor& weight,
             const Tensor& bounds, std::optional<double> dual_clip) {
  STD_TORCH_CHECK(logprob.dim() == 1, "logprob must have shape [T], got ", shape_text(logprob));
  const int64_t num_tokens = logprob.size(0);
  const auto check_floats = [&](const char* name, const Tensor& tensor) {
    check_vector(name, tensor, ScalarType::Float, num_tokens, "logprob", logprob);
  };
  check_floats("logprob", logprob);
  if (entropy.has_value()) check_floats("entropy", *entropy);
  check_floats("behaviour_logprob", behaviour_logprob);
  check_floats("advantage", advantage);
  check_floats("mask", mask);
  check_floats("weight", weight);
  check_vector("bounds", bounds, ScalarType::Double, kNumBoundsFields, "logprob", logprob);
  STD_TORCH_CHECK(!dual_clip.has_value() || (*dual_clip > 1 && std::isfinite(*dual_clip)),
                  "dual_clip must be > 1 and finite, got ", dual_clip.value_or(0));

  const Tensor sums = torch::stable::new_empty(logprob, {kNumLossSums}, ScalarType::Double);
  const Tensor coefficient = torch::stable::new_empty(logprob, {num_tokens});
  const PolicyLossParams params{data<float>(logprob),
                                optional_data<float>(entropy),
                                data<float>(behaviour_logprob),
                                data<float>(advantage),
                                data<float>(mask),
                                data<float>(weight),
                                num_tokens,
                                data<double>(bounds),
                                dual_clip.has_value() ? static_cast<float>(*dual_clip) : kInfinity,
                                mutable_data<double>(sums),
                                mutable_data<float>(coefficient)};
  return {{sums, coefficient}, params};
}

Results policy_loss_cpu(const Tensor& logprob, const OptionalTensor& entropy,
                        const Tensor& behaviour_logprob, const Tensor& advantage,
                        const Tensor& mask, const Tensor& weight, const Tensor& bounds,
                        std::optional<double> dual_clip) {
  const Call call =
      prepare(logprob, entropy, behaviour_logprob, advantage, mask, weight, bounds, dual_clip);
  const PolicyLossParams& params = call.params;
  std::fill_n(params.sums, static_cast<int>(kNumLossSums), 0.0);

  if (params.num_tokens == 0) return call.results;

  using Sums = std::array<double, kNumLossSums>;
  const int64_t num_chunks = (params.num_tokens + kPolicyLossChunk - 1) / kPolicyLossChunk;
  std::vector<Sums> chunk_sums(num_chunks, Sums{});
  torch::stable::parallel_for(0, num_chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t first = chunk * kPolicyLossChunk;
      policy_loss(params, first, std::min(first + kPolicyLossChunk, params.num_tokens),
                  chunk_sums[chunk].data());
    }
  });
  for (const Sums& sums : chunk_sums) {
    for (int i = 0; i < kNumLossSums; ++i) params.sums[i] += sums[i];
  }
  return call.results;
}

#if defined(BAPO_WITH_CUDA)
Results policy_loss_cuda(const Tensor& logprob, const OptionalTensor& entropy,
                         const Tensor& behaviour_logprob, const Tensor& advantage,
                         const Tensor& mask, const Tensor& weight, const Tensor& bounds,
                         std::optional<double> dual_clip) {
  const Call call =
      prepare(logprob, entropy, behaviour_logprob, advantage, mask, weight, bounds, dual_clip);

  const int64_t scratch_bytes = bapo_policy_loss_scratch_bytes(call.params.num_tokens);
  const Tensor scratch = torch::stable::new_empty(logprob, {scratch_bytes}, ScalarType::Byte);

  const LaunchScope scope(logprob);
  check_launch("policy_loss",
               bapo_launch_policy_loss(&call.params, scratch.mutable_data_ptr(), scope.stream()));
  return call.results;
}
#endif

}  // namespace
}  // namespace bapo

STABLE_TORCH_LIBRARY_IMPL(bapo, CPU, library) {
  library.impl("policy_loss", TORCH_BOX(&bapo::policy_loss_cpu));
}

#if defined(BAPO_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(bapo, CUDA, library) {
  library.impl("policy_loss", TORCH_BOX(&bapo::policy_loss_cuda));
}
#endif
