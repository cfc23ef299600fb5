// Candidate bounds and the path on which they are tried, as plain data that a kernel can take by
// value.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace bapo {

// Maximum candidates per side: keeps the table small enough for a GPU's shared memory.
constexpr int kMaxCandidates = 256;

enum class Order { kUpperFirst, kLowerFirst };

// Edges are ascending float32. The lower side has one more edge, the dual clip, where there is one.
// Unused edges are 0 and there is no padding, so that equal grids have equal bytes.
struct ClipGrid {
  int num_upper;
  int num_lower;
  int has_dual_clip;  // 0 or 1
  Order order;
  float upper[kMaxCandidates];
  float lower[kMaxCandidates + 1];
};
static_assert(sizeof(ClipGrid) == 4 * (4 + kMaxCandidates + kMaxCandidates + 1), "padded");

// Indices of one pair of bounds.
struct PathPoint {
  int upper;
  int lower;
};

BAPO_HD int num_lower_edges(const ClipGrid& grid) { return grid.num_lower + grid.has_dual_clip; }

BAPO_HD int path_length(const ClipGrid& grid) { return grid.num_upper + grid.num_lower - 1; }

// The bound that moves first goes from its start to its end, then the other one does.
BAPO_HD PathPoint path_point(const ClipGrid& grid, int index) {
  if (grid.order == Order::kUpperFirst) {
    const int last = grid.num_upper - 1;
    return index <= last ? PathPoint{index, 0} : PathPoint{last, index - last};
  }
  const int last = grid.num_lower - 1;
  return index <= last ? PathPoint{0, index} : PathPoint{index - last, last};
}

}  // namespace bapo
