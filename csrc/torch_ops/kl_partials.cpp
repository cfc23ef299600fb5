// kl_partials: one read of the student's and the teacher's logits. T tokens, V columns.

#include <string>

#include "cpu/logprob.h"
#include "torch_ops/checks.h"
#include "torch_ops/op.h"

namespace bapo {
namespace {

Tensor kl_partials_op(const Tensor& student, const Tensor& teacher, const Tensor& target,
                      int64_t vocab_start, int64_t vocab_size, double temperature,
                      const std::string& direction) {
  const LogitsPair logits =
      check_logits_pair(student, teacher, vocab_start, vocab_size, temperature);
  const int64_t num_tokens = logits.student.num_rows;
  check_vector("target", target, ScalarType::Long, num_tokens, "student", student);
  const KlDirection kind = check_direction(direction);

  const Tensor partials = torch::stable::new_empty(student, {num_tokens, 8}, ScalarType::Float);
  if (num_tokens == 0) return partials;

  const KlPartialsParams params{logits.student, logits.teacher, data<int64_t>(target),
                                num_tokens,     kind,           mutable_data<float>(partials)};
  if (BAPO_LAUNCHED(kl_partials, bapo_launch_kl_partials, student, params)) return partials;

  check_indices(logits.student, nullptr, params.target, num_tokens);
  const Isa isa = active_isa();
  torch::stable::parallel_for(
      0, num_tokens, 1, [&](int64_t begin, int64_t end) { kl_partials(params, isa, begin, end); });
  return partials;
}

}  // namespace
}  // namespace bapo

BAPO_REGISTER_OP(kl_partials, kl_partials_op)
