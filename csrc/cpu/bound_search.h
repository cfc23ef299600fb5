// Checked construction of a grid, and the search over a summed table with everything it reports.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/clip_grid.h"
#include "common/params.h"
#include "common/search.h"

namespace bapo {

struct Range {
  double start;
  double max;
  double step;
};

// How the candidates of a range are formed.
enum class Spacing {
  kMultiples,   // float32(start + k * step), k = 0 .. floor((max - start) / step + 1e-6)
  kRunningSum,  // c = min(c + step, max) in double precision until max, each rounded to float32
};

// Throws std::invalid_argument unless 0.5 <= lower.start <= lower.max <= 1 <= upper.start <=
// upper.max < 256, each step is > 0 and gives at most kMaxCandidates, and the dual clip, if any, is
// > 1.
ClipGrid make_clip_grid(const Range& lower, const Range& upper, Order order, Spacing spacing,
                        std::optional<double> dual_clip);

// The rule from its names. Throws std::invalid_argument for an unknown name, and unless 2^-25 <
// target < 1 (share) or 256 (ratio).
SearchRule make_rule(double target, const std::string& contribution, const std::string& measure);

// Throws std::invalid_argument unless the grid is one that make_clip_grid could have made.
void check_clip_grid(const ClipGrid& grid);

// One pair of bounds on the path.
struct Candidate {
  float clip_low;
  float clip_high;
  Balance balance;
  double positive_share;
  bool passes;
};

struct SearchResult {
  int index;  // of the chosen pair in candidates
  Exit exit;
  std::vector<Candidate> candidates;  // the whole path, in order
};

// Throws std::invalid_argument for a table that holds a negative sum, counted non-finite or
// out-of-range tokens or holds kTokenLimit tokens or more.
void check_searchable(const int64_t* table, const ClipGrid& grid);

// Finds the first pair on the path that passes, else the last one, in a table that is searchable.
SearchResult search_path(const int64_t* table, const ClipGrid& grid, const SearchRule& rule);

// The same decision as numbers, for a caller that cannot stop: a table that is not searchable gives
// Exit::kRefused, one without tokens of either sign Exit::kNoSearch.
void write_bounds(const SearchBoundsParams& params);

}  // namespace bapo
