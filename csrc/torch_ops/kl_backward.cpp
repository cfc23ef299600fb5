// kl_backward_: overwrites the student's logits with their gradient. T tokens, V columns.

#include <string>

#include "cpu/logprob.h"
#include "torch_ops/checks.h"
#include "torch_ops/op.h"

namespace bapo {
namespace {

void kl_backward_op(const Tensor& student, const Tensor& teacher, const Tensor& target,
                    const Tensor& max, const Tensor& log_sum, const Tensor& entropy,
                    const Tensor& teacher_max, const Tensor& teacher_log_sum, const Tensor& kl,
                    const OptionalTensor& grad_logprob, const OptionalTensor& grad_entropy,
                    const Tensor& grad_kl, int64_t vocab_start, int64_t vocab_size,
                    double temperature, const std::string& direction) {
  LogitsPair logits = check_logits_pair(student, teacher, vocab_start, vocab_size, temperature);
  const int64_t num_tokens = logits.student.num_rows;
  check_vector("target", target, ScalarType::Long, num_tokens, "student", student);
  const auto check_floats = [&](const char* name, const Tensor& tensor) {
    check_vector(name, tensor, ScalarType::Float, num_tokens, "student", student);
  };
  check_floats("max", max);
  check_floats("log_sum", log_sum);
  check_floats("entropy", entropy);
  check_floats("teacher_max", teacher_max);
  check_floats("teacher_log_sum", teacher_log_sum);
  check_floats("kl", kl);
  if (grad_logprob.has_value()) check_floats("grad_logprob", *grad_logprob);
  if (grad_entropy.has_value()) check_floats("grad_entropy", *grad_entropy);
  check_floats("grad_kl", grad_kl);
  const KlDirection kind = check_direction(direction);
  if (student.is_cpu()) {
    check_indices(logits.student, nullptr, data<int64_t>(target), num_tokens);
  }
  if (num_tokens == 0 || logits.student.num_columns == 0) return;

  logits.student.data = student.mutable_data_ptr();  // materializes copy-on-write storage
  const KlBackwardParams params{logits.student,
                                logits.teacher,
                                data<int64_t>(target),
                                num_tokens,
                                data<float>(max),
                                data<float>(log_sum),
                                data<float>(entropy),
                                data<float>(teacher_max),
                                data<float>(teacher_log_sum),
                                data<float>(kl),
                                optional_data<float>(grad_logprob),
                                optional_data<float>(grad_entropy),
                                data<float>(grad_kl),
                                kind};
  if (BAPO_LAUNCHED(kl_backward_, bapo_launch_kl_backward, student, params)) return;

  const Isa isa = active_isa();
  torch::stable::parallel_for(
      0, num_tokens, 1, [&](int64_t begin, int64_t end) { kl_backward(params, isa, begin, end); });
}

}  // namespace
}  // namespace bapo

BAPO_REGISTER_OP(kl_backward_, kl_backward_op)
