// logprob_partials: one read of each selected row of the logits. N rows, V columns, T tokens.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "cpu/logprob.h"
#include "torch_ops/checks.h"
#include "torch_ops/cuda_launch.h"

namespace bapo {
namespace {

struct Call {
  Tensor partials;  // [T, 4]
  LogprobPartialsParams params;
};

Call prepare(const Tensor& logits, const OptionalTensor& rows, const Tensor& target,
             int64_t vocab_start, int64_t vocab_size, double temperature) {
  const Logits checked = check_logits(logits, vocab_start, vocab_size, temperature);
  const int64_t num_tokens = check_tokens(logits, rows, target);

  Tensor partials = torch::stable::new_empty(logits, {num_tokens, 4}, ScalarType::Float);
  const LogprobPartialsParams params{checked, optional_data<int64_t>(rows), data<int64_t>(target),
                                     num_tokens, mutable_data<float>(partials)};
  return {partials, params};
}

Tensor logprob_partials_cpu(const Tensor& logits, const OptionalTensor& rows, const Tensor& target,
                            int64_t vocab_start, int64_t vocab_size, double temperature) {
  const Call call = prepare(logits, rows, target, vocab_start, vocab_size, temperature);
  const LogprobPartialsParams& params = call.params;
  check_indices(params.logits, params.rows, params.target, params.num_tokens);

  if (params.num_tokens == 0) return call.partials;

  const Isa isa = active_isa();
  torch::stable::parallel_for(0, params.num_tokens, 1, [&](int64_t begin, int64_t end) {
    logprob_partials(params, isa, begin, end);
  });
  return call.partials;
}

#if defined(BAPO_WITH_CUDA)
Tensor logprob_partials_cuda(const Tensor& logits, const OptionalTensor& rows, const Tensor& target,
                             int64_t vocab_start, int64_t vocab_size, double temperature) {
  const Call call = prepare(logits, rows, target, vocab_start, vocab_size, temperature);

  if (call.params.num_tokens == 0) return call.partials;

  const LaunchScope scope(logits);
  check_launch("logprob_partials", bapo_launch_logprob_partials(&call.params, scope.stream()));
  return call.partials;
}
#endif

}  // namespace
}  // namespace bapo

STABLE_TORCH_LIBRARY_IMPL(bapo, CPU, library) {
  library.impl("logprob_partials", TORCH_BOX(&bapo::logprob_partials_cpu));
}

#if defined(BAPO_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(bapo, CUDA, library) {
  library.impl("logprob_partials", TORCH_BOX(&bapo::logprob_partials_cuda));
}
#endif
