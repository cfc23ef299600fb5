// logits_backward_: overwrites logits with their gradient. N rows, V columns, T tokens.

#include "cpu/logprob.h"
#include "torch_ops/checks.h"
#include "torch_ops/op.h"

namespace bapo {
namespace {

void logits_backward_op(const Tensor& logits, const OptionalTensor& rows, const Tensor& target,
                        const Tensor& max, const Tensor& log_sum, const Tensor& entropy,
                        const OptionalTensor& grad_logprob, const OptionalTensor& grad_entropy,
                        int64_t vocab_start, int64_t vocab_size, double temperature) {
  Logits checked = check_logits("logits", logits, vocab_start, vocab_size, temperature);
  const int64_t num_tokens = check_tokens(logits, rows, target);
  const auto check_floats = [&](const char* name, const Tensor& tensor) {
    check_vector(name, tensor, ScalarType::Float, num_tokens, "logits", logits);
  };
  check_floats("max", max);
  check_floats("log_sum", log_sum);
  check_floats("entropy", entropy);
  if (grad_logprob.has_value()) check_floats("grad_logprob", *grad_logprob);
  if (grad_entropy.has_value()) check_floats("grad_entropy", *grad_entropy);
  STD_TORCH_CHECK(num_tokens <= checked.num_rows, "rows must select each row at most once, got ",
                  num_tokens, " tokens for ", checked.num_rows, " rows");

  checked.data = logits.mutable_data_ptr();  // materializes copy-on-write storage
  // On a GPU rows in order need no map. It stays alive until the kernel is queued.
  const bool needs_map = rows.has_value() || logits.is_cpu();
  const Tensor token_of_row =
      torch::stable::new_empty(logits, {needs_map ? checked.num_rows : 0}, ScalarType::Int);
  const LogitsBackwardParams params{checked,
                                    optional_data<int64_t>(rows),
                                    data<int64_t>(target),
                                    num_tokens,
                                    data<float>(max),
                                    data<float>(log_sum),
                                    data<float>(entropy),
                                    optional_data<float>(grad_logprob),
                                    optional_data<float>(grad_entropy),
                                    mutable_data<int32_t>(token_of_row)};
  if (logits.is_cpu()) {
    check_indices(checked, params.rows, params.target, num_tokens);
    STD_TORCH_CHECK(assign_tokens_to_rows(params),
                    "rows must select each row at most once, got a row twice");
  }
  if (checked.num_rows == 0 || checked.num_columns == 0) return;

  if (BAPO_LAUNCHED(logits_backward_, bapo_launch_logits_backward, logits, params)) return;

  const Isa isa = active_isa();
  torch::stable::parallel_for(0, checked.num_rows, 1, [&](int64_t begin, int64_t end) {
    logits_backward(params, isa, begin, end);
  });
}

}  // namespace
}  // namespace bapo

BAPO_REGISTER_OP(logits_backward_, logits_backward_op)
