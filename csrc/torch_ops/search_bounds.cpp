// search_bounds: the first pair of bounds that passes, on the table's device.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>

#include "cpu/bound_search.h"
#include "torch_ops/checks.h"
#include "torch_ops/cuda_launch.h"

namespace bapo {
namespace {

struct Call {
  Tensor bounds;  // [kNumBoundsFields]
  SearchBoundsParams params;
};

Call prepare(const Tensor& table, const Tensor& grid, double target,
             const std::string& contribution, const std::string& measure) {
  const ClipGrid checked = check_grid(grid);
  check_table(table, checked);
  const auto contribution_kind = check_choice<Contribution>(
      "contribution", contribution,
      {{"surrogate", Contribution::kSurrogate}, {"gradient", Contribution::kGradient}});
  const auto measure_kind = check_choice<Measure>(
      "measure", measure, {{"share", Measure::kShare}, {"ratio", Measure::kRatio}});
  const uint64_t target_units = check_target(target, measure_kind);

  const Tensor bounds = torch::stable::new_empty(table, {kNumBoundsFields}, ScalarType::Double);
  const SearchBoundsParams params{data<int64_t>(table), checked,      target_units,
                                  contribution_kind,    measure_kind, mutable_data<double>(bounds)};
  return {bounds, params};
}

Tensor search_bounds_cpu(const Tensor& table, const Tensor& grid, double target,
                         const std::string& contribution, const std::string& measure) {
  const Call call = prepare(table, grid, target, contribution, measure);

  write_bounds(call.params);
  return call.bounds;
}

#if defined(BAPO_WITH_CUDA)
Tensor search_bounds_cuda(const Tensor& table, const Tensor& grid, double target,
                          const std::string& contribution, const std::string& measure) {
  const Call call = prepare(table, grid, target, contribution, measure);

  const LaunchScope scope(table);
  check_launch("search_bounds", bapo_launch_search_bounds(&call.params, scope.stream()));
  return call.bounds;
}
#endif

}  // namespace
}  // namespace bapo

STABLE_TORCH_LIBRARY_IMPL(bapo, CPU, library) {
  library.impl("search_bounds", TORCH_BOX(&bapo::search_bounds_cpu));
}

#if defined(BAPO_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(bapo, CUDA, library) {
  library.impl("search_bounds", TORCH_BOX(&bapo::search_bounds_cuda));
}
#endif
