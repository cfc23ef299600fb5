// The policy loss of a batch of tokens, on the CPU.
#pragma once

#include <cstdint>

#include "common/params.h"

namespace bapo {

// Tokens whose sums are formed together, so that the result does not depend on who forms them.
constexpr int64_t kPolicyLossChunk = 4096;

// Writes the coefficients of tokens begin <= t < end and adds their sums, in order, to sums.
void policy_loss(const PolicyLossParams& params, int64_t begin, int64_t end, double* sums);

}  // namespace bapo
