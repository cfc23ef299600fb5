// The policy loss of one token and its derivative.
#pragma once

#include "common/contribution.h"
#include "common/host_device.h"

#if !defined(__CUDA_ARCH__)
#include <cmath>
#endif

namespace bapo {

// Sums over tokens with mask 1, float64.
enum LossSum : int {
  kSumTokens,
  kSumPositive,         // tokens with A > 0
  kSumSigned,           // tokens with A != 0
  kSumPolicyLoss,       // sum weight * policy loss
  kSumWeightedEntropy,  // sum weight * H
  kSumEntropy,          // sum H
  kSumKl,               // sum r - 1 - log r
  kSumClippedHigh,      // tokens with A > 0 held by the upper bound
  kSumClippedLow,       // tokens with A < 0 held by the lower bound
  kSumClippedDual,      // tokens with A < 0 held by the dual clip
  kSumNonFinite,        // tokens with a log-prob or advantage that is NaN or infinite
  kNumLossSums
};

struct TokenLoss {
  double loss;        // -weight A clamp(r)
  float coefficient;  // d loss / d logprob
  double kl;
  bool high;
  bool low;
  bool dual;
};

// For A > 0: A min(r, high); for A < 0: A clamp(r, low, dual_clip). The gradient passes at r equal
// to a limit, and stops where |logprob - behaviour_logprob| exceeds 20. Arguments are finite, but
// high and dual_clip may be infinite.
BAPO_HD TokenLoss token_loss(float logprob, float behaviour_logprob, float advantage, float weight,
                             float low, float high, float dual_clip) {
  const float ratio = importance_ratio(logprob, behaviour_logprob);
  const bool positive = advantage > 0.0f;
  const bool negative = advantage < 0.0f;
  const float floor = negative ? low : 0.0f;
  const float ceiling = negative ? dual_clip : high;
  const bool above = ratio > ceiling;
  const bool below = ratio < floor;
  const float clamped = above ? ceiling : (below ? floor : ratio);
  const double weighted = -static_cast<double>(weight) * static_cast<double>(advantage);
  float log_ratio = logprob - behaviour_logprob;
  const bool inside = __builtin_fabsf(log_ratio) <= kLogRatioLimit;
  const double bounded = log_ratio > kLogRatioLimit    ? kLogRatioLimit
                         : log_ratio < -kLogRatioLimit ? -kLogRatioLimit
                                                       : log_ratio;
  const bool moves = inside && !above && !below && (positive || negative);
  return {positive || negative ? weighted * static_cast<double>(clamped) : 0.0,
          moves ? static_cast<float>(weighted * static_cast<double>(ratio)) : 0.0f,
          expm1(bounded) - bounded,
          positive && above,
          negative && below,
          negative && above};
}

}  // namespace bapo
