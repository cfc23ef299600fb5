// contributions_: adds tokens to the contribution table. T tokens.

#include <mutex>
#include <string>
#include <vector>

#include "cpu/choices.h"
#include "torch_ops/checks.h"
#include "torch_ops/op.h"

namespace bapo {
namespace {

void contributions_op(const Tensor& table, const Tensor& grid, const Tensor& logprob,
                      const Tensor& behaviour_logprob, const Tensor& advantage, const Tensor& mask,
                      const std::string& weight) {
  const ClipGrid checked = check_grid(grid);
  check_table(table, checked);
  const int64_t num_tokens = check_num_tokens("logprob", logprob);
  const auto check_floats = [&](const char* name, const Tensor& tensor) {
    check_vector(name, tensor, ScalarType::Float, num_tokens, "table", table);
  };
  check_floats("logprob", logprob);
  check_floats("behaviour_logprob", behaviour_logprob);
  check_floats("advantage", advantage);
  check_floats("mask", mask);
  STD_TORCH_CHECK(num_tokens < kTokenLimit, "logprob must have fewer than 2^31 tokens, got ",
                  num_tokens);
  const WeightKind kind = with_check_error([&] {
    return parse_choice<WeightKind>(
        "weight", weight,
        {{"uniform", WeightKind::kUniform}, {"behaviour_prob", WeightKind::kBehaviourProb}});
  });
  if (num_tokens == 0) return;

  const ContributionsParams params{data<float>(logprob),
                                   data<float>(behaviour_logprob),
                                   data<float>(advantage),
                                   data<float>(mask),
                                   num_tokens,
                                   checked,
                                   kind,
                                   mutable_data<int64_t>(table)};
  if (BAPO_LAUNCHED(contributions_, bapo_launch_contributions, table, params)) return;

  const Isa isa = active_isa();
  std::mutex mutex;  // sums are integers: threads may add them in any order
  for_each_token_range(num_tokens, [&](int64_t begin, int64_t end) {
    if (end - begin == num_tokens) return add_contributions(params, isa, begin, end, params.table);
    std::vector<int64_t> sums(num_slots(params.grid), 0);
    add_contributions(params, isa, begin, end, sums.data());
    const std::lock_guard<std::mutex> lock(mutex);
    for (size_t slot = 0; slot < sums.size(); ++slot) params.table[slot] += sums[slot];
  });
}

}  // namespace
}  // namespace bapo

BAPO_REGISTER_OP(contributions_, contributions_op)
