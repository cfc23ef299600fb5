// kl_combine: partials of all ranks into log-probs, entropies and divergences. P ranks, T tokens.

#include <string>
#include <tuple>

#include "cpu/logprob.h"
#include "torch_ops/checks.h"
#include "torch_ops/op.h"

namespace bapo {
namespace {

// Log-prob, entropy, max, log-sum, the teacher's max and log-sum, KL, each [T].
using KlResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

KlResults kl_combine_op(const Tensor& partials, double temperature, const std::string& direction) {
  check_partials(partials, 8);
  check_temperature(temperature);
  const KlDirection kind = check_direction(direction);

  const int64_t num_tokens = partials.size(1);
  const auto new_vector = [&] { return torch::stable::new_empty(partials, {num_tokens}); };
  const KlResults results{new_vector(), new_vector(), new_vector(), new_vector(),
                          new_vector(), new_vector(), new_vector()};
  if (num_tokens == 0) return results;

  const KlCombineParams params = std::apply(
      [&](const auto&... result) -> KlCombineParams {
        return {data<float>(partials),
                partials.size(0),
                num_tokens,
                static_cast<float>(temperature),
                kind,
                {mutable_data<float>(result)...}};
      },
      results);
  if (BAPO_LAUNCHED(kl_combine, bapo_launch_kl_combine, partials, params)) return results;

  torch::stable::parallel_for(0, num_tokens, kCombinedTokensPerTask,
                              [&](int64_t begin, int64_t end) { kl_combine(params, begin, end); });
  return results;
}

}  // namespace
}  // namespace bapo

BAPO_REGISTER_OP(kl_combine, kl_combine_op)
