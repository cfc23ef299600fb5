// logprob_combine: partials of all ranks into log-probs and entropies. P ranks, T tokens.

#include <tuple>

#include "cpu/logprob.h"
#include "torch_ops/checks.h"
#include "torch_ops/op.h"

namespace bapo {
namespace {

// Log-prob, entropy, max and log-sum, each [T].
using Results = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Results logprob_combine_op(const Tensor& partials, double temperature) {
  check_partials(partials, 4);
  check_temperature(temperature);

  const int64_t num_tokens = partials.size(1);
  const auto new_vector = [&] { return torch::stable::new_empty(partials, {num_tokens}); };
  const Results results{new_vector(), new_vector(), new_vector(), new_vector()};
  if (num_tokens == 0) return results;

  const LogprobCombineParams params{data<float>(partials),
                                    partials.size(0),
                                    num_tokens,
                                    static_cast<float>(temperature),
                                    mutable_data<float>(std::get<0>(results)),
                                    mutable_data<float>(std::get<1>(results)),
                                    mutable_data<float>(std::get<2>(results)),
                                    mutable_data<float>(std::get<3>(results))};
  if (BAPO_LAUNCHED(logprob_combine, bapo_launch_logprob_combine, partials, params)) {
    return results;
  }

  torch::stable::parallel_for(
      0, num_tokens, kCombinedTokensPerTask,
      [&](int64_t begin, int64_t end) { logprob_combine(params, begin, end); });
  return results;
}

}  // namespace
}  // namespace bapo

BAPO_REGISTER_OP(logprob_combine, logprob_combine_op)
