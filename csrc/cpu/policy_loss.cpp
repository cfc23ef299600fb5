#include "cpu/policy_loss.h"

#include "common/token_loss.h"

namespace bapo {

void policy_loss(const PolicyLossParams& params, int64_t begin, int64_t end, double* sums) {
  const float low = static_cast<float>(params.bounds[kBoundsLow]);
  const float high = static_cast<float>(params.bounds[kBoundsHigh]);
  for (int64_t t = begin; t < end; ++t) {
    params.coefficient[t] = 0.0f;
    if (params.mask[t] == 0.0f) continue;
    const float logprob = params.logprob[t];
    const float behaviour_logprob = params.behaviour_logprob[t];
    const float advantage = params.advantage[t];
    const float weight = params.weight[t];
    sums[kSumTokens] += 1;
    if (!(is_finite(logprob) && is_finite(behaviour_logprob) && is_finite(advantage))) {
      sums[kSumNonFinite] += 1;
      continue;
    }
    const TokenLoss token =
        token_loss(logprob, behaviour_logprob, advantage, weight, low, high, params.dual_clip);
    const double entropy = params.entropy == nullptr ? 0.0 : static_cast<double>(params.entropy[t]);
    params.coefficient[t] = token.coefficient;
    sums[kSumPositive] += advantage > 0.0f;
    sums[kSumSigned] += advantage != 0.0f;
    sums[kSumPolicyLoss] += token.loss;
    sums[kSumWeightedEntropy] += static_cast<double>(weight) * entropy;
    sums[kSumEntropy] += entropy;
    sums[kSumKl] += token.kl;
    sums[kSumClippedHigh] += token.high;
    sums[kSumClippedLow] += token.low;
    sums[kSumClippedDual] += token.dual;
  }
}

}  // namespace bapo
