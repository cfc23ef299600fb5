// Loops over tokens begin <= t < end, on the CPU. No result depends on the instruction set.
#pragma once

#include <cstdint>

#include "common/params.h"
#include "cpu/isa.h"

namespace bapo {

// Tokens below which a thread costs more than it saves.
constexpr int64_t kMinTokensPerThread = 1 << 14;

// Adds the tokens' contributions to table [num_slots(params.grid)], which need not be the table of
// params: threads sum separately.
void add_contributions(const ContributionsParams& params, Isa isa, int64_t begin, int64_t end,
                       int64_t* table);

// ratio[t] = importance_ratio_or_nan(logprob[t], behaviour_logprob[t]).
void importance_ratios(const ImportanceRatioParams& params, Isa isa, int64_t begin, int64_t end);

}  // namespace bapo
