// Log-probs, entropies and KL divergences from logits, and the gradient of the logits, on the CPU.
//
// Each function processes tokens (or rows) begin <= i < end, so that a caller can split them over
// threads; results do not depend on the split. Shapes are in common/params.h.
#pragma once

#include <cstdint>

#include "common/params.h"
#include "cpu/isa.h"

namespace bapo {

// partials[t] = Partials of the token over this rank's true columns. Rows and targets are in range.
void logprob_partials(const LogprobPartialsParams& params, Isa isa, int64_t begin, int64_t end);

// The token's log-prob, entropy, maximum and log-sum by combine_partials.
void logprob_combine(const LogprobCombineParams& params, int64_t begin, int64_t end);

// Fills token_of_row. False where a row has two tokens.
bool assign_tokens_to_rows(const LogitsBackwardParams& params);

// Overwrites rows begin <= row < end with their gradient, zeros where no token has a gradient.
void logits_backward(const LogitsBackwardParams& params, Isa isa, int64_t begin, int64_t end);

// partials[t] = KlPartials of the token over this rank's true columns. Targets are in range.
void kl_partials(const KlPartialsParams& params, Isa isa, int64_t begin, int64_t end);

// The token's seven results by combine_kl_partials.
void kl_combine(const KlCombineParams& params, int64_t begin, int64_t end);

// Overwrites the student's rows begin <= row < end, as logits_backward does.
void kl_backward(const KlBackwardParams& params, Isa isa, int64_t begin, int64_t end);

}  // namespace bapo
