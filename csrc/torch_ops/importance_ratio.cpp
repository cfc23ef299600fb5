// importance_ratio: r of each token, with the bits of the contribution table. T tokens.

#include "torch_ops/checks.h"
#include "torch_ops/op.h"

namespace bapo {
namespace {

Tensor importance_ratio_op(const Tensor& logprob, const Tensor& behaviour_logprob) {
  const int64_t num_tokens = check_num_tokens("logprob", logprob);
  check_vector("logprob", logprob, ScalarType::Float, num_tokens, "logprob", logprob);
  check_vector("behaviour_logprob", behaviour_logprob, ScalarType::Float, num_tokens, "logprob",
               logprob);

  const Tensor ratio = torch::stable::new_empty(logprob, {num_tokens});
  if (num_tokens == 0) return ratio;

  const ImportanceRatioParams params{data<float>(logprob), data<float>(behaviour_logprob),
                                     num_tokens, mutable_data<float>(ratio)};
  if (BAPO_LAUNCHED(importance_ratio, bapo_launch_importance_ratio, logprob, params)) return ratio;

  const Isa isa = active_isa();
  for_each_token_range(
      num_tokens, [&](int64_t begin, int64_t end) { importance_ratios(params, isa, begin, end); });
  return ratio;
}

}  // namespace
}  // namespace bapo

BAPO_REGISTER_OP(importance_ratio, importance_ratio_op)
