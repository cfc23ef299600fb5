#include "cpu/accumulate.h"

#include <algorithm>
#include <vector>

namespace bapo {
namespace {

constexpr int64_t kBlockTokens = 256;  // intermediate arrays stay in the first-level cache
constexpr int64_t kMinTokensPerThread = 1 << 14;  // below this a thread costs more than it saves

// Intermediate values of one block. The first loop below has no branches and becomes vector code;
// the second one, which has a data-dependent address, stays scalar.
struct Block {
  float ratio[kBlockTokens];
  double ratio_units[kBlockTokens];
  double contribution_units[kBlockTokens];
};

BAPO_HD void quantise(const TokenArrays& tokens, int64_t begin, int64_t count, WeightKind weight,
                      Block& block) {
  const float* logprob = tokens.logprob + begin;
  const float* behaviour = tokens.behaviour_logprob + begin;
  const float* advantage = tokens.advantage + begin;
  for (int64_t i = 0; i < count; ++i) {
    // Values that are not finite are replaced here and counted by add_to_table.
    const float current = is_finite(logprob[i]) ? logprob[i] : 0.0f;
    const float old = is_finite(behaviour[i]) ? behaviour[i] : 0.0f;
    const float finite_advantage = is_finite(advantage[i]) ? advantage[i] : 0.0f;
    const float ratio = importance_ratio(current, old);
    block.ratio[i] = ratio;
    block.ratio_units[i] = ratio_units(ratio);
    block.contribution_units[i] =
        contribution_units(weighted_advantage(finite_advantage, old, weight));
  }
}

BAPO_HD void add_to_table(const TokenArrays& tokens, int64_t begin, int64_t count,
                          const ClipGrid& grid, const Block& block, int64_t* table) {
  int64_t* counters = table + counter_offset(grid);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t token = begin + i;
    const float mask = tokens.mask[token];
    if (mask == 0.0f) continue;
    const float advantage = tokens.advantage[token];
    if (!(is_finite(tokens.logprob[token]) && is_finite(tokens.behaviour_logprob[token]) &&
          is_finite(advantage) && is_finite(mask))) {
      ++counters[kNonFinite];
      continue;
    }
    counters[kPositive] += advantage > 0.0f;
    counters[kNegative] += advantage < 0.0f;
    if (mask != 1.0f || block.contribution_units[i] >= kContributionLimit) {
      ++counters[kOutOfRange];
      continue;
    }
    const uint64_t a = static_cast<uint64_t>(static_cast<int64_t>(block.contribution_units[i]));
    if (a == 0) continue;
    const uint64_t q = static_cast<uint64_t>(static_cast<int64_t>(block.ratio_units[i]));
    const uint128 product = static_cast<uint128>(a) * q;
    int64_t* bin = table + bin_offset(grid, advantage > 0.0f, block.ratio[i]);
    bin[0] += static_cast<int64_t>(a);
    bin[1] += static_cast<int64_t>(static_cast<uint32_t>(product));
    bin[2] += static_cast<int64_t>(static_cast<uint32_t>(product >> 32));
    bin[3] += static_cast<int64_t>(product >> 64);
  }
}

BAPO_HD void accumulate_range(const TokenArrays& tokens, int64_t begin, int64_t end,
                              const ClipGrid& grid, WeightKind weight, int64_t* table) {
  Block block;
  for (int64_t start = begin; start < end; start += kBlockTokens) {
    const int64_t count = end - start < kBlockTokens ? end - start : kBlockTokens;
    // One loop per kind, so that neither has a branch inside.
    if (weight == WeightKind::kUniform) {
      quantise(tokens, start, count, WeightKind::kUniform, block);
    } else {
      quantise(tokens, start, count, WeightKind::kBehaviourProb, block);
    }
    add_to_table(tokens, start, count, grid, block, table);
  }
}

using RangeFunction = void (*)(const TokenArrays&, int64_t, int64_t, const ClipGrid&, WeightKind,
                               int64_t*);

void accumulate_portable(const TokenArrays& tokens, int64_t begin, int64_t end,
                         const ClipGrid& grid, WeightKind weight, int64_t* table) {
  accumulate_range(tokens, begin, end, grid, weight, table);
}

#if defined(__x86_64__)
#if defined(__clang__)
#define BAPO_TARGET_AVX512 "avx2,fma,avx512f,avx512dq,avx512vl"
#else
#define BAPO_TARGET_AVX512 "avx2,fma,avx512f,avx512dq,avx512vl,prefer-vector-width=512"
#endif

__attribute__((target("avx2,fma"))) void accumulate_avx2(const TokenArrays& tokens, int64_t begin,
                                                         int64_t end, const ClipGrid& grid,
                                                         WeightKind weight, int64_t* table) {
  accumulate_range(tokens, begin, end, grid, weight, table);
}

__attribute__((target(BAPO_TARGET_AVX512))) void accumulate_avx512(const TokenArrays& tokens,
                                                                   int64_t begin, int64_t end,
                                                                   const ClipGrid& grid,
                                                                   WeightKind weight,
                                                                   int64_t* table) {
  accumulate_range(tokens, begin, end, grid, weight, table);
}
#endif

RangeFunction select_function(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return accumulate_avx512;
  if (isa == Isa::kAvx2) return accumulate_avx2;
#endif
  static_cast<void>(isa);
  return accumulate_portable;
}

}  // namespace

void accumulate(const TokenArrays& tokens, const ClipGrid& grid, WeightKind weight, Isa isa,
                int num_threads, ForEachPart for_each_part, int64_t* table) {
  const RangeFunction function = select_function(isa);
  const int64_t useful = (tokens.num_tokens + kMinTokensPerThread - 1) / kMinTokensPerThread;
  const int64_t num_parts = std::max<int64_t>(1, std::min<int64_t>(num_threads, useful));
  if (num_parts == 1) {
    function(tokens, 0, tokens.num_tokens, grid, weight, table);
    return;
  }

  const int64_t part_size = (tokens.num_tokens + num_parts - 1) / num_parts;
  std::vector<std::vector<int64_t>> partial(num_parts, std::vector<int64_t>(num_slots(grid), 0));
  for_each_part(num_parts, [&](int64_t part) {
    const int64_t begin = std::min(part * part_size, tokens.num_tokens);
    const int64_t end = std::min(begin + part_size, tokens.num_tokens);
    function(tokens, begin, end, grid, weight, partial[part].data());
  });
  for (const std::vector<int64_t>& sums : partial) {
    for (int slot = 0; slot < num_slots(grid); ++slot) table[slot] += sums[slot];
  }
}

}  // namespace bapo
