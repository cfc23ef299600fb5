// Python module bapo_megatron._C: the contribution table and the bound search. The ops on tensors,
// torch.ops.bapo.*, are registered by torch_ops/ when the module is loaded.
//
// Arrays come in through the buffer protocol and the table goes out through it, so that the module
// depends neither on torch nor on NumPy.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/clip_grid.h"
#include "common/contribution.h"
#include "cpu/accumulate.h"
#include "cpu/bound_search.h"
#include "cpu/isa.h"
#include "torch_ops/parallel.h"

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

// A named choice of an enumeration; the error lists what is allowed.
template <typename T>
T parse_choice(const char* argument, const std::string& value,
               const std::vector<std::pair<const char*, T>>& choices) {
  std::string allowed;
  for (const auto& [name, choice] : choices) {
    if (value == name) return choice;
    allowed += (allowed.empty() ? "" : " or ") + std::string(name);
  }
  throw py::value_error(std::string(argument) + " must be " + allowed + ", got '" + value + "'");
}

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

std::vector<std::pair<float, float>> grid_path(const ClipGrid& grid) {
  std::vector<std::pair<float, float>> path;
  for (int index = 0; index < path_length(grid); ++index) {
    const PathPoint point = path_point(grid, index);
    path.emplace_back(grid.lower[point.lower], grid.upper[point.upper]);
  }
  return path;
}

// Field by field onto zeros, so that equal grids have equal bytes: padding has no fixed value.
py::bytes grid_bytes(const ClipGrid& grid) {
  char bytes[sizeof(ClipGrid)] = {};
  const auto put = [&bytes](size_t offset, const void* field, size_t size) {
    std::memcpy(bytes + offset, field, size);
  };
  put(offsetof(ClipGrid, num_upper), &grid.num_upper, sizeof(grid.num_upper));
  put(offsetof(ClipGrid, num_lower), &grid.num_lower, sizeof(grid.num_lower));
  put(offsetof(ClipGrid, has_dual_clip), &grid.has_dual_clip, sizeof(grid.has_dual_clip));
  put(offsetof(ClipGrid, order), &grid.order, sizeof(grid.order));
  put(offsetof(ClipGrid, upper), grid.upper, grid.num_upper * sizeof(float));
  put(offsetof(ClipGrid, lower), grid.lower, num_lower_edges(grid) * sizeof(float));
  return py::bytes(bytes, sizeof(bytes));
}

bool same_edges(const ClipGrid& left, const ClipGrid& right) {
  return std::vector<float>(left.upper, left.upper + left.num_upper) ==
             std::vector<float>(right.upper, right.upper + right.num_upper) &&
         std::vector<float>(left.lower, left.lower + num_lower_edges(left)) ==
             std::vector<float>(right.lower, right.lower + num_lower_edges(right)) &&
         left.has_dual_clip == right.has_dual_clip;
}

// One input array, held for as long as this lives.
class FloatArray {
 public:
  FloatArray(const char* name, const py::buffer& buffer) : name_(name), info_(buffer.request()) {
    if (info_.format != py::format_descriptor<float>::format()) {
      throw py::value_error(name_ + " must be float32, got buffer format '" + info_.format +
                            "'; convert it to float32");
    }
    if (info_.ndim != 1) {
      throw py::value_error(name_ + " must have shape [T], got " + std::to_string(info_.ndim) +
                            " dimensions; flatten it");
    }
    if (size() > 1 && info_.strides[0] != static_cast<py::ssize_t>(sizeof(float))) {
      throw py::value_error(name_ + " must be contiguous, got a stride of " +
                            std::to_string(info_.strides[0]) + " bytes; copy it");
    }
  }

  int64_t size() const { return info_.shape[0]; }
  const float* data() const { return static_cast<const float*>(info_.ptr); }

  void require_size(int64_t size_wanted) const {
    if (size() != size_wanted) {
      throw py::value_error(name_ + " must have as many tokens as logprob, " +
                            std::to_string(size_wanted) + ", got " + std::to_string(size()));
    }
  }

 private:
  std::string name_;
  py::buffer_info info_;
};

class ContributionTable {
 public:
  explicit ContributionTable(const ClipGrid& grid) : grid_(grid), slots_(num_slots(grid), 0) {}

  void add(const py::buffer& logprob, const py::buffer& behaviour_logprob,
           const py::buffer& advantage, const py::buffer& mask, const std::string& weight,
           int num_threads, const std::string& isa) {
    const FloatArray logprob_array("logprob", logprob);
    const FloatArray behaviour_array("behaviour_logprob", behaviour_logprob);
    const FloatArray advantage_array("advantage", advantage);
    const FloatArray mask_array("mask", mask);
    const int64_t num_tokens = logprob_array.size();
    for (const FloatArray* array : {&behaviour_array, &advantage_array, &mask_array}) {
      array->require_size(num_tokens);
    }
    if (num_tokens >= kTokenLimit) {
      throw py::value_error("logprob must have fewer than 2^31 tokens, got " +
                            std::to_string(num_tokens));
    }
    if (num_threads < 1) {
      throw py::value_error("num_threads must be at least 1, got " + std::to_string(num_threads));
    }
    const auto kind = parse_choice<WeightKind>(
        "weight", weight,
        {{"uniform", WeightKind::kUniform}, {"behaviour_prob", WeightKind::kBehaviourProb}});
    const Isa chosen = parse_isa(isa);
    const TokenArrays tokens{logprob_array.data(), behaviour_array.data(), advantage_array.data(),
                             mask_array.data(), num_tokens};

    // Summed apart while other Python threads run, then added in one go.
    std::vector<int64_t> sums(slots_.size(), 0);
    {
      const py::gil_scoped_release release;
      accumulate(tokens, grid_, kind, chosen, num_threads, for_each_part, sums.data());
    }
    for (size_t slot = 0; slot < slots_.size(); ++slot) slots_[slot] += sums[slot];
  }

  void reset() { slots_.assign(slots_.size(), 0); }  // keeps the address that buffers point to
  int64_t counter(Counter counter) const { return slots_[counter_offset(grid_) + counter]; }
  const ClipGrid& grid() const { return grid_; }
  std::vector<int64_t>& slots() { return slots_; }

 private:
  ClipGrid grid_;
  std::vector<int64_t> slots_;
};

SearchResult search(ContributionTable& table, const ClipGrid& grid, double target,
                    const std::string& contribution, const std::string& measure) {
  if (!same_edges(grid, table.grid())) {
    throw py::value_error(
        "grid must have the candidates that the table was made with; make a table for this grid");
  }
  return search_bounds(
      table.slots().data(), grid, target,
      parse_choice<Contribution>(
          "contribution", contribution,
          {{"surrogate", Contribution::kSurrogate}, {"gradient", Contribution::kGradient}}),
      parse_choice<Measure>("measure", measure,
                            {{"share", Measure::kShare}, {"ratio", Measure::kRatio}}));
}

py::int_ to_python_int(uint128 value) {
  const py::int_ high(static_cast<uint64_t>(value >> 64));
  const py::int_ low(static_cast<uint64_t>(value));
  return py::int_((high << py::int_(64)) | low);
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
  info["max_candidates"] = kMaxCandidates;
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

void bind_table(py::module_& module) {
  py::class_<ClipGrid>(module, "ClipGrid", "Candidate bounds and the path on which they are tried.")
      .def(py::init(&new_grid), py::arg("lower"), py::arg("upper"), py::kw_only(),
           py::arg("order") = "upper_first", py::arg("spacing") = "multiples",
           py::arg("dual_clip") = py::none())
      .def_property_readonly(
          "lower",
          [](const ClipGrid& g) { return std::vector<float>(g.lower, g.lower + g.num_lower); })
      .def_property_readonly(
          "upper",
          [](const ClipGrid& g) { return std::vector<float>(g.upper, g.upper + g.num_upper); })
      .def_property_readonly("order",
                             [](const ClipGrid& g) {
                               return g.order == Order::kUpperFirst ? "upper_first" : "lower_first";
                             })
      .def_property_readonly("dual_clip",
                             [](const ClipGrid& g) {
                               return g.has_dual_clip ? std::optional<float>(g.lower[g.num_lower])
                                                      : std::nullopt;
                             })
      .def_property_readonly("path", &grid_path, "(clip_low, clip_high) pairs, in order.")
      .def("to_bytes", &grid_bytes, "The grid as the ops of torch.ops.bapo take it.");

  py::class_<ContributionTable>(module, "ContributionTable", py::buffer_protocol(),
                                "Exact sums of token contributions; add tables up by any sum.")
      .def(py::init<const ClipGrid&>(), py::arg("grid"))
      .def("accumulate", &ContributionTable::add, py::arg("logprob"), py::arg("behaviour_logprob"),
           py::arg("advantage"), py::arg("mask"), py::kw_only(), py::arg("weight") = "uniform",
           py::arg("num_threads") = 1, py::arg("isa") = "auto")
      .def("reset", &ContributionTable::reset)
      .def_property_readonly("grid", &ContributionTable::grid)
      .def_property_readonly("nonfinite_tokens",
                             [](const ContributionTable& t) { return t.counter(kNonFinite); })
      .def_property_readonly("out_of_range_tokens",
                             [](const ContributionTable& t) { return t.counter(kOutOfRange); })
      .def_property_readonly("positive_tokens",
                             [](const ContributionTable& t) { return t.counter(kPositive); })
      .def_property_readonly("negative_tokens",
                             [](const ContributionTable& t) { return t.counter(kNegative); })
      .def("__len__", [](ContributionTable& t) { return t.slots().size(); })
      .def_buffer([](ContributionTable& t) {
        return py::buffer_info(t.slots().data(), static_cast<py::ssize_t>(t.slots().size()));
      });
}

void bind_search(py::module_& module) {
  py::class_<Candidate>(module, "Candidate", "One pair of bounds on the path.")
      .def_readonly("clip_low", &Candidate::clip_low)
      .def_readonly("clip_high", &Candidate::clip_high)
      .def_readonly("positive_share", &Candidate::positive_share)
      .def_readonly("passes", &Candidate::passes)
      .def_property_readonly(
          "positive", [](const Candidate& c) { return to_natural_units(c.balance.positive); })
      .def_property_readonly(
          "negative", [](const Candidate& c) { return to_natural_units(c.balance.negative); })
      .def_property_readonly("positive_units",
                             [](const Candidate& c) { return to_python_int(c.balance.positive); })
      .def_property_readonly("negative_units",
                             [](const Candidate& c) { return to_python_int(c.balance.negative); });

  py::class_<SearchResult>(module, "SearchResult", "The chosen pair and the whole path.")
      .def_readonly("index", &SearchResult::index)
      .def_readonly("candidates", &SearchResult::candidates)
      .def_property_readonly("exit", [](const SearchResult& r) { return exit_name(r.exit); })
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
  module.doc() = "Exact contribution table and bound search of BAPO (csrc/README.md).";
  bind_table(module);
  bind_search(module);
  module.def(
      "use_isa", [](const std::string& name) { set_active_isa(parse_isa(name)); }, py::arg("name"),
      "Chooses the instruction set of all CPU ops, for tests and benchmarks.");
  module.def("build_info", &build_info, "How this module was built and what it runs on.");
}

}  // namespace bapo
