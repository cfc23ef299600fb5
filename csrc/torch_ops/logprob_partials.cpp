// logprob_partials: one read of each selected row of the logits. N rows, V columns, T tokens.

#include "cpu/logprob.h"
#include "torch_ops/checks.h"
#include "torch_ops/op.h"

namespace bapo {
namespace {

Tensor logprob_partials_op(const Tensor& logits, const OptionalTensor& rows, const Tensor& target,
                           int64_t vocab_start, int64_t vocab_size, double temperature) {
  const Logits checked = check_logits("logits", logits, vocab_start, vocab_size, temperature);
  const int64_t num_tokens = check_tokens(logits, rows, target);

  const Tensor partials = torch::stable::new_empty(logits, {num_tokens, 4}, ScalarType::Float);
  if (num_tokens == 0) return partials;

  const LogprobPartialsParams params{checked, optional_data<int64_t>(rows), data<int64_t>(target),
                                     num_tokens, mutable_data<float>(partials)};
  if (BAPO_LAUNCHED(logprob_partials, bapo_launch_logprob_partials, logits, params)) {
    return partials;
  }

  check_indices(checked, params.rows, params.target, num_tokens);
  const Isa isa = active_isa();
  torch::stable::parallel_for(0, num_tokens, 1, [&](int64_t begin, int64_t end) {
    logprob_partials(params, isa, begin, end);
  });
  return partials;
}

}  // namespace
}  // namespace bapo

BAPO_REGISTER_OP(logprob_partials, logprob_partials_op)
