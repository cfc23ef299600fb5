// search_bounds: the first pair of bounds that passes, on the table's device.

#include <string>

#include "cpu/bound_search.h"
#include "torch_ops/checks.h"
#include "torch_ops/op.h"

namespace bapo {
namespace {

Tensor search_bounds_op(const Tensor& table, const Tensor& grid, double target,
                        const std::string& contribution, const std::string& measure) {
  const ClipGrid checked = check_grid(grid);
  check_table(table, checked);
  const SearchRule rule = check_rule(target, contribution, measure);

  const Tensor bounds = torch::stable::new_empty(table, {kNumBoundsFields}, ScalarType::Double);
  const SearchBoundsParams params{data<int64_t>(table), checked, rule,
                                  mutable_data<double>(bounds)};
  if (BAPO_LAUNCHED(search_bounds, bapo_launch_search_bounds, table, params)) return bounds;

  write_bounds(params);
  return bounds;
}

}  // namespace
}  // namespace bapo

BAPO_REGISTER_OP(search_bounds, search_bounds_op)
