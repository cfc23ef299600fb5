// logprob_combine: partials of all ranks into log-probs and entropies. P ranks, T tokens.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "cpu/logprob.h"
#include "torch_ops/checks.h"
#include "torch_ops/cuda_launch.h"

namespace bapo {
namespace {

constexpr int64_t kTokensPerTask = 1024;

using Results = std::tuple<Tensor, Tensor, Tensor, Tensor>;

struct Call {
  Results results;  // logprob, entropy, max, log_sum, each [T]
  LogprobCombineParams params;
};

Call prepare(const Tensor& partials, double temperature) {
  check_type("partials", partials, ScalarType::Float);
  STD_TORCH_CHECK(partials.dim() == 3 && partials.size(0) >= 1 && partials.size(2) == 4,
                  "partials must have shape [P, T, 4] with P >= 1, got ", shape_text(partials));
  STD_TORCH_CHECK(partials.is_contiguous(), "partials must be contiguous");
  check_temperature(temperature);

  const int64_t num_tokens = partials.size(1);
  const auto new_vector = [&] { return torch::stable::new_empty(partials, {num_tokens}); };
  const Tensor logprob = new_vector();
  const Tensor entropy = new_vector();
  const Tensor max = new_vector();
  const Tensor log_sum = new_vector();
  const LogprobCombineParams params{data<float>(partials),
                                    partials.size(0),
                                    num_tokens,
                                    static_cast<float>(temperature),
                                    mutable_data<float>(logprob),
                                    mutable_data<float>(entropy),
                                    mutable_data<float>(max),
                                    mutable_data<float>(log_sum)};
  return {{logprob, entropy, max, log_sum}, params};
}

Results logprob_combine_cpu(const Tensor& partials, double temperature) {
  const Call call = prepare(partials, temperature);

  if (call.params.num_tokens == 0) return call.results;

  torch::stable::parallel_for(
      0, call.params.num_tokens, kTokensPerTask,
      [&](int64_t begin, int64_t end) { logprob_combine(call.params, begin, end); });
  return call.results;
}

#if defined(BAPO_WITH_CUDA)
Results logprob_combine_cuda(const Tensor& partials, double temperature) {
  const Call call = prepare(partials, temperature);

  if (call.params.num_tokens == 0) return call.results;

  const LaunchScope scope(partials);
  check_launch("logprob_combine", bapo_launch_logprob_combine(&call.params, scope.stream()));
  return call.results;
}
#endif

}  // namespace
}  // namespace bapo

STABLE_TORCH_LIBRARY_IMPL(bapo, CPU, library) {
  library.impl("logprob_combine", TORCH_BOX(&bapo::logprob_combine_cpu));
}

#if defined(BAPO_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(bapo, CUDA, library) {
  library.impl("logprob_combine", TORCH_BOX(&bapo::logprob_combine_cuda));
}
#endif
