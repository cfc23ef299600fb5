// contributions_: adds tokens to the contribution table. T tokens.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>

#include "cpu/accumulate.h"
#include "torch_ops/checks.h"
#include "torch_ops/cuda_launch.h"
#include "torch_ops/parallel.h"

namespace bapo {
namespace {

ContributionsParams prepare(const Tensor& table, const Tensor& grid, const Tensor& logprob,
                            const Tensor& behaviour_logprob, const Tensor& advantage,
                            const Tensor& mask, const std::string& weight) {
  const ClipGrid checked = check_grid(grid);
  check_table(table, checked);
  STD_TORCH_CHECK(logprob.dim() == 1, "logprob must have shape [T], got ", shape_text(logprob));
  const int64_t num_tokens = logprob.size(0);
  const auto check_floats = [&](const char* name, const Tensor& tensor) {
    check_vector(name, tensor, ScalarType::Float, num_tokens, "table", table);
  };
  check_floats("logprob", logprob);
  check_floats("behaviour_logprob", behaviour_logprob);
  check_floats("advantage", advantage);
  check_floats("mask", mask);
  STD_TORCH_CHECK(num_tokens < kTokenLimit, "logprob must have fewer than 2^31 tokens, got ",
                  num_tokens);
  const auto kind = check_choice<WeightKind>(
      "weight", weight,
      {{"uniform", WeightKind::kUniform}, {"behaviour_prob", WeightKind::kBehaviourProb}});
  return {data<float>(logprob),
          data<float>(behaviour_logprob),
          data<float>(advantage),
          data<float>(mask),
          num_tokens,
          checked,
          kind,
          mutable_data<int64_t>(table)};
}

void contributions_cpu(const Tensor& table, const Tensor& grid, const Tensor& logprob,
                       const Tensor& behaviour_logprob, const Tensor& advantage, const Tensor& mask,
                       const std::string& weight) {
  const ContributionsParams params =
      prepare(table, grid, logprob, behaviour_logprob, advantage, mask, weight);

  if (params.num_tokens == 0) return;

  const TokenArrays tokens{params.logprob, params.behaviour_logprob, params.advantage, params.mask,
                           params.num_tokens};
  accumulate(tokens, params.grid, params.weight, active_isa(),
             static_cast<int>(torch::stable::get_num_threads()), for_each_part, params.table);
}

#if defined(BAPO_WITH_CUDA)
void contributions_cuda(const Tensor& table, const Tensor& grid, const Tensor& logprob,
                        const Tensor& behaviour_logprob, const Tensor& advantage,
                        const Tensor& mask, const std::string& weight) {
  const ContributionsParams params =
      prepare(table, grid, logprob, behaviour_logprob, advantage, mask, weight);

  if (params.num_tokens == 0) return;

  const LaunchScope scope(table);
  check_launch("contributions_", bapo_launch_contributions(&params, scope.stream()));
}
#endif

}  // namespace
}  // namespace bapo

STABLE_TORCH_LIBRARY_IMPL(bapo, CPU, library) {
  library.impl("contributions_", TORCH_BOX(&bapo::contributions_cpu));
}

#if defined(BAPO_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(bapo, CUDA, library) {
  library.impl("contributions_", TORCH_BOX(&bapo::contributions_cuda));
}
#endif
