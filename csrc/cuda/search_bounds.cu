// The bound search on the device: nothing waits for the host between search and loss.
#include "common/logprob.h"
#include "common/search.h"
#include "cuda/device.cuh"
#include "cuda/launch.h"

namespace bapo {
namespace {

constexpr int kThreads = 512;  // one per pair of the longest path
constexpr int kMaxPath = 2 * kMaxCandidates - 1;
static_assert(kThreads >= kMaxPath, "thread i tries pair i");
static_assert(kThreads >= 2 * kMaxCandidates, "thread i sums for candidate i of both sides");

// The sums at each candidate.
struct Sums {
  uint128 positive[kMaxCandidates];
  uint128 negative[kMaxCandidates];
};

__device__ __forceinline__ void write_bounds(double low, double high, double share_start,
                                             double share, Exit exit, double* bounds) {
  bounds[kBoundsLow] = low;
  bounds[kBoundsHigh] = high;
  bounds[kBoundsShareStart] = share_start;
  bounds[kBoundsShare] = share;
  bounds[kBoundsExit] = static_cast<double>(static_cast<int>(exit));
}

__device__ __forceinline__ void write_pair(const SearchBoundsParams& params, const Sums& sums,
                                           int first_passing, double* bounds) {
  const ClipGrid& grid = params.grid;
  const int last = path_length(grid) - 1;
  const int chosen = first_passing > last ? last : first_passing;
  const PathPoint start = path_point(grid, 0);
  const PathPoint point = path_point(grid, chosen);
  const Exit exit = first_passing > last ? Exit::kExhausted
                    : first_passing == 0 ? Exit::kStart
                                         : Exit::kMet;
  write_bounds(grid.lower[point.lower], grid.upper[point.upper],
               positive_share({sums.positive[start.upper], sums.negative[start.lower]}),
               positive_share({sums.positive[point.upper], sums.negative[point.lower]}), exit,
               bounds);
}

// The first pair on the path whose sums pass, else the last one (common/search.h): thread k forms P
// at upper candidate k or N at lower candidate k - kMaxCandidates, then thread i tries pair i.
// A table with tokens that are not finite or out of range, with a negative slot or with 2^31 tokens
// is refused: [0, inf].
// Grid: one block of kThreads. table [num_slots(grid)], bounds [kNumBoundsFields].
__global__ void __launch_bounds__(kThreads)
    search_bounds_kernel(const __grid_constant__ SearchBoundsParams params) {
  __shared__ int64_t table[kMaxSlots];
  __shared__ Sums sums;
  __shared__ int first_passing;
  const ClipGrid& grid = params.grid;
  const int thread = static_cast<int>(threadIdx.x);
  bool is_negative = false;
  for (int i = thread; i < num_slots(grid); i += kThreads) {
    table[i] = params.table[i];
    is_negative = is_negative || table[i] < 0;
  }
  if (thread == 0) first_passing = INT_MAX;
  const bool has_negative = __syncthreads_or(is_negative ? 1 : 0) != 0;

  if (thread < grid.num_upper) {
    sums.positive[thread] = positive_sum(table, grid, thread, params.rule.contribution);
  }
  const int lower = thread - kMaxCandidates;
  if (lower >= 0 && lower < grid.num_lower) {
    sums.negative[lower] = negative_sum(table, grid, lower, params.rule.contribution);
  }
  __syncthreads();
  if (thread < path_length(grid)) {
    const PathPoint point = path_point(grid, thread);
    const Balance balance{sums.positive[point.upper], sums.negative[point.lower]};
    if (passes(balance, params.rule)) atomicMin(&first_passing, thread);
  }
  __syncthreads();
  if (thread != 0) return;

  const int64_t* counters = table + counter_offset(grid);
  double* bounds = params.bounds;
  if (has_negative || !counters_allow_search(counters)) {
    write_bounds(0.0, kInfinity, kNaN, kNaN, Exit::kRefused, bounds);
  } else if (counters[kPositive] + counters[kNegative] == 0) {
    const PathPoint start = path_point(grid, 0);
    write_bounds(grid.lower[start.lower], grid.upper[start.upper], kNaN, kNaN, Exit::kNoSearch,
                 bounds);
  } else {
    write_pair(params, sums, first_passing, bounds);
  }
  bounds[kBoundsNonFinite] = static_cast<double>(counters[kNonFinite]);
  bounds[kBoundsOutOfRange] = static_cast<double>(counters[kOutOfRange]);
  bounds[kBoundsTokens] = static_cast<double>(counters[kPositive] + counters[kNegative]);
}

}  // namespace
}  // namespace bapo

extern "C" int bapo_launch_search_bounds(const bapo::SearchBoundsParams* params, void* stream) {
  return bapo::launch(bapo::search_bounds_kernel, 1, bapo::kThreads, stream, *params);
}
