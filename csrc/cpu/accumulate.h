// Contributions of a batch of tokens, on the CPU.
#pragma once

#include <cstdint>
#include <functional>

#include "common/clip_grid.h"
#include "common/contribution.h"
#include "cpu/isa.h"

namespace bapo {

// Tokens of one call; arrays of num_tokens float32.
struct TokenArrays {
  const float* logprob;            // current log-prob
  const float* behaviour_logprob;  // log-prob by the policy that sampled the token
  const float* advantage;
  const float* mask;  // 1: counts, 0: is skipped whatever else it holds
  int64_t num_tokens;
};

// Calls the task once for each part, 0 <= part < num_parts, in any order and on any threads.
//
// The caller gives it: beside torch the parts belong on torch's own threads, since those spin for a
// while after their last work and threads of ours would share the cores with them.
using ForEachPart = void (*)(int64_t num_parts, const std::function<void(int64_t)>& task);

// Adds every token's contribution to table[num_slots(grid)].
//
// The result does not depend on the order of tokens, the number of threads or the instruction set.
// It is divided into at most num_threads parts, fewer where the batch is small.
void accumulate(const TokenArrays& tokens, const ClipGrid& grid, WeightKind weight, Isa isa,
                int num_threads, ForEachPart for_each_part, int64_t* table);

}  // namespace bapo
