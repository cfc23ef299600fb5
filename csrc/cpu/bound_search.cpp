#include "cpu/bound_search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <stdexcept>

#include "cpu/choices.h"

namespace bapo {
namespace {

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

[[noreturn]] void fail_candidates(const char* side, const Range& range) {
  fail(side, ": at most ", kMaxCandidates, " candidates per side, got more from start ",
       range.start, ", max ", range.max, ", step ", range.step, "; use a larger step");
}

std::vector<float> form_candidates(const char* side, const Range& range, Spacing spacing) {
  if (!(std::isfinite(range.step) && range.step > 0)) {
    fail(side, ".step must be > 0 and finite, got ", range.step);
  }
  std::vector<float> candidates;
  if (spacing == Spacing::kMultiples) {
    constexpr double kTolerance = 1e-6;  // (0.95 - 0.8) / 0.05 is 2.9999999999999973
    const double last = std::floor((range.max - range.start) / range.step + kTolerance);
    if (last >= kMaxCandidates) fail_candidates(side, range);
    for (int k = 0; k <= static_cast<int>(last); ++k) {
      candidates.push_back(static_cast<float>(range.start + k * range.step));
    }
    return candidates;
  }
  double candidate = range.start;
  candidates.push_back(static_cast<float>(candidate));
  while (candidate < range.max) {
    if (candidates.size() == kMaxCandidates) fail_candidates(side, range);
    candidate = std::min(candidate + range.step, range.max);
    candidates.push_back(static_cast<float>(candidate));
  }
  return candidates;
}

bool is_trustworthy(const int64_t* table, const ClipGrid& grid) {
  return std::all_of(table, table + num_slots(grid), [](int64_t slot) { return slot >= 0; }) &&
         counters_allow_search(table + counter_offset(grid));
}

}  // namespace

void check_searchable(const int64_t* table, const ClipGrid& grid) {
  if (is_trustworthy(table, grid)) return;
  const int64_t* counters = table + counter_offset(grid);
  if (std::any_of(table, table + num_slots(grid), [](int64_t slot) { return slot < 0; })) {
    fail("the table holds a negative sum; fill it with contributions_ and sum-reduce only");
  }
  if (counters[kNonFinite] > 0) {
    fail("the table counted ", counters[kNonFinite],
         " tokens with a log-prob, advantage or mask that is not finite; find them and skip the "
         "update or repair the batch");
  }
  if (counters[kOutOfRange] > 0) {
    fail("the table counted ", counters[kOutOfRange],
         " tokens with |weight * advantage| >= 256 or a mask other than 0 and 1; scale the "
         "advantages down or repair the mask");
  }
  fail(
      "the table holds 2^31 tokens or more, its sums may have overflowed; search over smaller "
      "batches");
}

SearchRule make_rule(double target, const std::string& contribution, const std::string& measure) {
  const auto contribution_kind = parse_choice<Contribution>(
      "contribution", contribution,
      {{"surrogate", Contribution::kSurrogate}, {"gradient", Contribution::kGradient}});
  const auto measure_kind = parse_choice<Measure>(
      "measure", measure, {{"share", Measure::kShare}, {"ratio", Measure::kRatio}});
  const double limit = measure_kind == Measure::kShare ? 1.0 : 256.0;
  if (!(target > 0 && target < limit)) {
    fail("target must lie between 0 and ", limit, " with measure ", measure, ", got ", target);
  }
  const double units = std::rint(target * kUnitsPerOne);
  if (units < 1) fail("target must be above 2^-25, got ", target);
  return {static_cast<uint64_t>(units), contribution_kind, measure_kind};
}

void check_clip_grid(const ClipGrid& grid) {
  const auto in_range = [](int count) { return 1 <= count && count <= kMaxCandidates; };
  if (!in_range(grid.num_upper) || !in_range(grid.num_lower)) {
    fail("grid must have 1 to ", kMaxCandidates, " candidates per side, got ", grid.num_lower,
         " lower and ", grid.num_upper, " upper ones");
  }
  if (grid.has_dual_clip != 0 && grid.has_dual_clip != 1) {
    fail("grid must be the bytes of ClipGrid.to_bytes(), got ", grid.has_dual_clip,
         " for a yes or no");
  }
  if (grid.order != Order::kUpperFirst && grid.order != Order::kLowerFirst) {
    fail("grid must have a known order, got ", static_cast<int>(grid.order));
  }
  const auto check_side = [](const char* side, const float* edges, int count, float least,
                             float greatest) {
    if (!(edges[0] >= least && edges[count - 1] <= greatest)) {
      fail("grid's ", side, " candidates must lie between ", least, " and ", greatest, ", got ",
           edges[0], " to ", edges[count - 1]);
    }
    for (int k = 1; k < count; ++k) {
      if (!(edges[k - 1] <= edges[k])) {
        fail("grid's ", side, " candidates must ascend, got ", edges[k - 1], " before ", edges[k]);
      }
    }
  };
  check_side("lower", grid.lower, grid.num_lower, 0.5f, 1.0f);
  check_side("upper", grid.upper, grid.num_upper, 1.0f, 256.0f);
  const float dual_clip = grid.lower[grid.num_lower];
  if (grid.has_dual_clip && !(dual_clip > 1.0f && is_finite(dual_clip))) {
    fail("grid's dual_clip must be > 1 and finite, got ", dual_clip);
  }
}

ClipGrid make_clip_grid(const Range& lower, const Range& upper, Order order, Spacing spacing,
                        std::optional<double> dual_clip) {
  if (!(0.5 <= lower.start && lower.start <= lower.max && lower.max <= 1)) {
    fail("needs 0.5 <= lower.start <= lower.max <= 1, got start ", lower.start, " and max ",
         lower.max);
  }
  if (!(1 <= upper.start && upper.start <= upper.max && upper.max < 256)) {
    fail("needs 1 <= upper.start <= upper.max < 256, got start ", upper.start, " and max ",
         upper.max);
  }
  const std::vector<float> low = form_candidates("lower", lower, spacing);
  const std::vector<float> high = form_candidates("upper", upper, spacing);

  ClipGrid grid{};
  grid.num_upper = static_cast<int>(high.size());
  grid.num_lower = static_cast<int>(low.size());
  grid.order = order;
  std::copy(high.begin(), high.end(), grid.upper);
  std::copy(low.begin(), low.end(), grid.lower);
  if (dual_clip.has_value()) {
    const float edge = static_cast<float>(*dual_clip);
    if (!(std::isfinite(edge) && edge > std::max(1.0f, low.back()))) {
      fail("dual_clip must be > 1 and finite, got ", *dual_clip);
    }
    grid.has_dual_clip = 1;
    grid.lower[grid.num_lower] = edge;
  }
  return grid;
}

SearchResult search_path(const int64_t* table, const ClipGrid& grid, const SearchRule& rule) {
  std::vector<uint128> positive(grid.num_upper);
  std::vector<uint128> negative(grid.num_lower);
  for (int k = 0; k < grid.num_upper; ++k) {
    positive[k] = positive_sum(table, grid, k, rule.contribution);
  }
  for (int k = 0; k < grid.num_lower; ++k) {
    negative[k] = negative_sum(table, grid, k, rule.contribution);
  }

  SearchResult result{path_length(grid) - 1, Exit::kExhausted, {}};
  for (int index = 0; index < path_length(grid); ++index) {
    const PathPoint point = path_point(grid, index);
    const Balance balance{positive[point.upper], negative[point.lower]};
    const bool pass = passes(balance, rule);
    if (pass && result.exit == Exit::kExhausted) {
      result.index = index;
      result.exit = index == 0 ? Exit::kStart : Exit::kMet;
    }
    result.candidates.push_back(
        {grid.lower[point.lower], grid.upper[point.upper], balance, positive_share(balance), pass});
  }
  return result;
}

void write_bounds(const SearchBoundsParams& params) {
  constexpr double kNoShare = std::numeric_limits<double>::quiet_NaN();
  const ClipGrid& grid = params.grid;
  const int64_t* counters = params.table + counter_offset(grid);
  double* bounds = params.bounds;
  const auto write = [bounds](double low, double high, double share_start, double share,
                              Exit exit) {
    bounds[kBoundsLow] = low;
    bounds[kBoundsHigh] = high;
    bounds[kBoundsShareStart] = share_start;
    bounds[kBoundsShare] = share;
    bounds[kBoundsExit] = static_cast<double>(exit);
  };
  bounds[kBoundsNonFinite] = static_cast<double>(counters[kNonFinite]);
  bounds[kBoundsOutOfRange] = static_cast<double>(counters[kOutOfRange]);
  bounds[kBoundsTokens] =
      static_cast<double>(counters[kPositive]) + static_cast<double>(counters[kNegative]);
  if (!is_trustworthy(params.table, grid)) {
    write(0.0, std::numeric_limits<double>::infinity(), kNoShare, kNoShare, Exit::kRefused);
    return;
  }
  if (counters[kPositive] + counters[kNegative] == 0) {
    write(grid.lower[0], grid.upper[0], kNoShare, kNoShare, Exit::kNoSearch);
    return;
  }
  const SearchResult result = search_path(params.table, grid, params.rule);
  const Candidate& chosen = result.candidates[result.index];
  write(chosen.clip_low, chosen.clip_high, result.candidates.front().positive_share,
        chosen.positive_share, result.exit);
}

}  // namespace bapo
