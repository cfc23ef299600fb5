// Python module bapo_megatron._C: the grid of candidates, and the bound search with its whole path,
// for inspection. The ops on tensors, torch.ops.bapo.*, are registered by torch_ops/ when
// the module is loaded.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/clip_grid.h"
#include "common/contribution.h"
#include "cpu/bound_search.h"
#include "cpu/choices.h"
#include "cpu/isa.h"

#if defined(BAPO_WITH_CUDA)
#include "cuda/launch.h"
#include "torch_ops/cuda_launch.h"
#endif

namespace py = pybind11;

namespace bapo {
namespace {

#if defined(__clang__)
constexpr const char* kCompiler = __VERSION__;
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif

Range to_range(const std::tuple<double, double, double>& range) {
  return {std::get<0>(range), std::get<1>(range), std::get<2>(range)};
}

ClipGrid new_grid(const std::tuple<double, double, double>& lower,
                  const std::tuple<double, double, double>& upper, const std::string& order,
                  const std::string& spacing, std::optional<double> dual_clip) {
  return make_clip_grid(to_range(lower), to_range(upper),
                        parse_choice<Order>("order", order,
                                            {{"upper_first", Order::kUpperFirst},
                                             {"lower_first", Order::kLowerFirst}}),
                        parse_choice<Spacing>("spacing", spacing,
                                              {{"multiples", Spacing::kMultiples},
                                               {"running_sum", Spacing::kRunningSum}}),
                        dual_clip);
}

SearchResult search(const std::vector<int64_t>& table, const ClipGrid& grid, double target,
                    const std::string& contribution, const std::string& measure) {
  const SearchRule rule = make_rule(target, contribution, measure);
  if (table.size() != static_cast<size_t>(num_slots(grid))) {
    throw py::value_error("table must have the grid's " + std::to_string(num_slots(grid)) +
                          " slots, got " + std::to_string(table.size()));
  }
  check_searchable(table.data(), grid);
  return search_path(table.data(), grid, rule);
}

double to_natural_units(uint128 value) {
  return static_cast<double>(value) / (kUnitsPerOne * kUnitsPerOne);
}

py::dict build_info() {
  py::dict info;
  info["version"] = BAPO_VERSION;
  info["git_commit"] = BAPO_GIT_COMMIT;
  info["compiler"] = kCompiler;
  info["flags"] = BAPO_COMPILE_FLAGS;
  info["isa"] = isa_name(active_isa());
  std::vector<std::string> isas;
  for (const Isa isa : available_isas()) isas.push_back(isa_name(isa));
  info["available_isas"] = isas;
#if defined(BAPO_WITH_CUDA)
  info["cuda"] = true;
  info["cuda_streams"] = torch_has_cuda_streams();
  info["cuda_archs"] = BAPO_CUDA_ARCHS;
  info["cuda_runtime"] = bapo_cuda_runtime_version();
  info["cuda_driver"] = bapo_cuda_driver_version();
#else
  info["cuda"] = false;
  info["cuda_streams"] = false;
  info["cuda_archs"] = "";
  info["cuda_runtime"] = 0;
  info["cuda_driver"] = 0;
#endif
  return info;
}

void bind_search(py::module_& module) {
  py::class_<ClipGrid>(module, "ClipGrid", "Candidate bounds and the path on which they are tried.")
      .def(py::init(&new_grid), py::arg("lower"), py::arg("upper"), py::kw_only(),
           py::arg("order") = "upper_first", py::arg("spacing") = "multiples",
           py::arg("dual_clip") = py::none())
      .def_property_readonly("num_slots", &num_slots, "Length of the grid's contribution table.")
      .def(
          "to_bytes",
          [](const ClipGrid& grid) {
            return py::bytes(reinterpret_cast<const char*>(&grid), sizeof(grid));
          },
          "The grid as the ops of torch.ops.bapo take it.");

  py::class_<Candidate>(module, "Candidate", "One pair of bounds on the path.")
      .def_readonly("clip_low", &Candidate::clip_low)
      .def_readonly("clip_high", &Candidate::clip_high)
      .def_readonly("positive_share", &Candidate::positive_share)
      .def_readonly("passes", &Candidate::passes)
      .def_property_readonly(
          "positive", [](const Candidate& c) { return to_natural_units(c.balance.positive); })
      .def_property_readonly(
          "negative", [](const Candidate& c) { return to_natural_units(c.balance.negative); });

  py::class_<SearchResult>(module, "SearchResult", "The chosen pair and the whole path.")
      .def_readonly("index", &SearchResult::index)
      .def_readonly("candidates", &SearchResult::candidates)
      .def_property_readonly(
          "exit",
          [](const SearchResult& r) {
            return r.exit == Exit::kStart ? "start" : r.exit == Exit::kMet ? "met" : "exhausted";
          })
      .def_property_readonly("clip_low",
                             [](const SearchResult& r) { return r.candidates[r.index].clip_low; })
      .def_property_readonly("clip_high",
                             [](const SearchResult& r) { return r.candidates[r.index].clip_high; })
      .def_property_readonly(
          "positive_share_start",
          [](const SearchResult& r) { return r.candidates.front().positive_share; })
      .def_property_readonly("positive_share", [](const SearchResult& r) {
        return r.candidates[r.index].positive_share;
      });

  module.def("search", &search, py::arg("table"), py::arg("grid"), py::arg("target"),
             py::arg("contribution"), py::arg("measure"));
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Candidate bounds and bound search of BAPO (csrc/README.md).";
  bind_search(module);
  module.def(
      "use_isa", [](const std::string& name) { set_active_isa(parse_isa(name)); }, py::arg("name"),
      "Chooses the instruction set of all CPU ops, for tests and benchmarks.");
  module.def("build_info", &build_info, "How this module was built and what it runs on.");
}

}  // namespace bapo
