// One token's contribution as integers, and where it goes in the table.
//
// The table is a flat array of int64 slots (README.md has the bounds that rule out overflow):
//   upper side: num_upper + 1 bins, then lower side: num_lower_edges + 1 bins, 4 slots each:
//     sum of a, and sum of a * q in three limbs of 32 bits, each limb summed on its own;
//   then one slot for each Counter.
// Every slot is a sum over tokens, so tables add up: over blocks, threads, micro-batches and ranks.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

#include "common/clip_grid.h"
#include "common/det_exp.h"
#include "common/host_device.h"
#include "common/wide_integer.h"

namespace bapo {

constexpr double kUnitsPerOne = 16777216.0;          // 2^24: resolution of r and of |w A|
constexpr double kContributionLimit = 4294967296.0;  // 2^32 units: |w A| stays below 2^8
constexpr float kLogRatioLimit = 20.0f;            // |logprob - behaviour logprob| is clamped to it
constexpr int64_t kTokenLimit = int64_t{1} << 31;  // tokens in one table, over all ranks
constexpr int kSlotsPerBin = 4;

enum class WeightKind { kUniform, kBehaviourProb };

// Extra slots, summed by the same all-reduce.
enum Counter : int {
  kNonFinite,   // a log-prob, the advantage or the mask is NaN or infinite
  kOutOfRange,  // |w A| >= 2^8, or a mask that is neither 0 nor 1
  kPositive,    // tokens with A > 0
  kNegative,    // tokens with A < 0
  kNumCounters
};

BAPO_HD int num_upper_bins(const ClipGrid& grid) { return grid.num_upper + 1; }
BAPO_HD int num_lower_bins(const ClipGrid& grid) { return num_lower_edges(grid) + 1; }
BAPO_HD int counter_offset(const ClipGrid& grid) {
  return (num_upper_bins(grid) + num_lower_bins(grid)) * kSlotsPerBin;
}
BAPO_HD int num_slots(const ClipGrid& grid) { return counter_offset(grid) + kNumCounters; }

// num_slots of the largest grid, whose lower side has a dual clip.
constexpr int kMaxSlots = (2 * kMaxCandidates + 3) * kSlotsPerBin + static_cast<int>(kNumCounters);

BAPO_HD bool is_finite(float x) { return __builtin_fabsf(x) <= FLT_MAX; }

// The next smaller float32 of x > 0.
BAPO_HD float float_below(float x) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(__float_as_uint(x) - 1);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  --bits;
  std::memcpy(&x, &bits, sizeof(bits));
  return x;
#endif
}

// Nearest integer of 0 <= x < 2^53, ties to even, without a library call.
BAPO_HD double round_to_even(double x) {
  constexpr double kTwo52 = 4503599627370496.0;
  const double rounded = (x + kTwo52) - kTwo52;
  return x < kTwo52 ? rounded : x;
}

// r = exp(clamp(logprob - behaviour, +-20)) in float32, from finite log-probs.
BAPO_HD float importance_ratio(float logprob, float behaviour_logprob) {
  float log_ratio = logprob - behaviour_logprob;
  log_ratio = log_ratio > kLogRatioLimit ? kLogRatioLimit : log_ratio;
  log_ratio = log_ratio < -kLogRatioLimit ? -kLogRatioLimit : log_ratio;
  return static_cast<float>(det_exp(static_cast<double>(log_ratio)));
}

// The same from any log-probs: NaN where one of them is NaN or infinite.
BAPO_HD float importance_ratio_or_nan(float logprob, float behaviour_logprob) {
  // x - x is 0 or NaN: without a branch the loop becomes vector code.
  const float zero = (logprob - logprob) + (behaviour_logprob - behaviour_logprob);
  return importance_ratio(logprob, behaviour_logprob) + zero;
}

// q: r in units of 2^-24, below 2^53 because r <= e^20 < 2^29.
BAPO_HD double ratio_units(float ratio) {
  return round_to_even(static_cast<double>(ratio) * kUnitsPerOne);
}

// w A in double precision; w = exp(behaviour logprob) or 1.
BAPO_HD double weighted_advantage(float advantage, float behaviour_logprob, WeightKind weight) {
  if (weight == WeightKind::kUniform) return static_cast<double>(advantage);
  double exponent = static_cast<double>(behaviour_logprob);
  exponent = exponent > kDetExpLimit ? kDetExpLimit : exponent;
  exponent = exponent < -kDetExpLimit ? -kDetExpLimit : exponent;
  return det_exp(exponent) * static_cast<double>(advantage);
}

// a: |w A| in units of 2^-24, or kContributionLimit where it would reach 2^8.
BAPO_HD double contribution_units(double weighted) {
  const double magnitude = __builtin_fabs(weighted) * kUnitsPerOne;
  return magnitude < kContributionLimit ? round_to_even(magnitude) : kContributionLimit;
}

// Number of ascending edges e with e <= ratio, by a binary search without branches.
BAPO_HD int count_edges_at_most(const float* edges, int num_edges, float ratio) {
  int count = 0;
  int remaining = num_edges;
  while (remaining > 1) {
    const int half = remaining / 2;
    count += edges[count + half - 1] <= ratio ? half : 0;
    remaining -= half;
  }
  return count + (edges[count] <= ratio ? 1 : 0);
}

// First slot of the token's bin: #{e <= r} on the upper side, #{e < r} on the lower side.
//
// Binned on the float32 ratio, not on its units: a ratio just below a candidate can round to the
// candidate's units.
BAPO_HD int bin_offset(const ClipGrid& grid, bool positive, float ratio) {
  if (positive) {
    const bool in_first = ratio < grid.upper[0];
    return in_first ? 0 : kSlotsPerBin * count_edges_at_most(grid.upper, grid.num_upper, ratio);
  }
  const int num_edges = num_lower_edges(grid);
  const bool in_last = grid.lower[num_edges - 1] < ratio;
  // e < r is e <= (the float below r), since r > 0.
  const int bin =
      in_last ? num_edges : count_edges_at_most(grid.lower, num_edges, float_below(ratio));
  return kSlotsPerBin * (num_upper_bins(grid) + bin);
}

}  // namespace bapo
