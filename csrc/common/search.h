// The bound search on a summed table: exact integers, the same decision on every rank.
#pragma once

#include <cstdint>

#include "common/clip_grid.h"
#include "common/contribution.h"
#include "common/host_device.h"
#include "common/wide_integer.h"

namespace bapo {

enum class Contribution { kSurrogate, kGradient };
enum class Measure { kShare, kRatio };

// The condition that a pair of bounds must meet.
struct SearchRule {
  uint64_t target_units;  // target in units of 2^-24
  Contribution contribution;
  Measure measure;
};

// How a search ended.
enum class Exit {
  kStart,
  kMet,
  kExhausted,
  kNoSearch,  // no token has a sign: the first pair, without shares
  kRefused,   // the table cannot be trusted: [0, inf], without shares
};

// Sums in units of 2^-48.
struct Balance {
  uint128 positive;  // P
  uint128 negative;  // N
};

// Whether sums that are all non-negative may be searched: every token is finite and in range, and
// there are too few of them for an overflow.
BAPO_HD bool counters_allow_search(const int64_t* counters) {
  return counters[kNonFinite] == 0 && counters[kOutOfRange] == 0 &&
         counters[kPositive] < kTokenLimit - counters[kNegative];
}

BAPO_HD uint128 bin_product_sum(const int64_t* bin) {
  return static_cast<uint128>(bin[1]) + (static_cast<uint128>(bin[2]) << 32) +
         (static_cast<uint128>(bin[3]) << 64);
}

// A candidate in units of 2^-24: exact, because candidates are float32 in [2^-1, 2^8).
BAPO_HD uint64_t candidate_units(float candidate) {
  return static_cast<uint64_t>(static_cast<double>(candidate) * kUnitsPerOne);
}

// P at upper candidate k: tokens with r < c_k lie in bins 0 .. k.
//   surrogate: sum a min(r, c_k);  gradient: tokens at or above c_k drop out.
BAPO_HD uint128 positive_sum(const int64_t* table, const ClipGrid& grid, int k,
                             Contribution contribution) {
  uint128 sum = 0;
  for (int bin = 0; bin <= k; ++bin) sum += bin_product_sum(table + kSlotsPerBin * bin);
  if (contribution == Contribution::kGradient) return sum;
  uint128 clipped = 0;
  for (int bin = k + 1; bin < num_upper_bins(grid); ++bin) clipped += table[kSlotsPerBin * bin];
  return sum + clipped * candidate_units(grid.upper[k]);
}

// N at lower candidate k: tokens with r <= c_k lie in bins 0 .. k.
//   surrogate: sum a max(r, c_k);  gradient: tokens at or below c_k, or above the dual clip, drop
//   out.
BAPO_HD uint128 negative_sum(const int64_t* table, const ClipGrid& grid, int k,
                             Contribution contribution) {
  const int64_t* side = table + kSlotsPerBin * num_upper_bins(grid);
  const bool gradient = contribution == Contribution::kGradient;
  const int end = num_lower_bins(grid) - (gradient && grid.has_dual_clip ? 1 : 0);
  uint128 sum = 0;
  for (int bin = k + 1; bin < end; ++bin) sum += bin_product_sum(side + kSlotsPerBin * bin);
  if (gradient) return sum;
  uint128 clipped = 0;
  for (int bin = 0; bin <= k; ++bin) clipped += side[kSlotsPerBin * bin];
  return sum + clipped * candidate_units(grid.lower[k]);
}

// share: P / (P + N) >= target;  ratio: P / N >= target. Empty sums pass.
BAPO_HD bool passes(const Balance& balance, const SearchRule& rule) {
  const uint64_t one = static_cast<uint64_t>(kUnitsPerOne);
  const uint64_t factor = rule.measure == Measure::kShare ? one - rule.target_units : one;
  return at_least(wide_multiply(balance.positive, factor),
                  wide_multiply(balance.negative, rule.target_units));
}

// P / (P + N), for reports only; 1 where both are 0.
BAPO_HD double positive_share(const Balance& balance) {
  const double positive = static_cast<double>(balance.positive);
  const double total = static_cast<double>(balance.positive + balance.negative);
  return total > 0 ? positive / total : 1.0;
}

}  // namespace bapo
