#include "cpu/token_loops.h"

#include <cstdint>

namespace bapo {
namespace {

constexpr int64_t kBlockTokens = 256;  // intermediate arrays stay in the first-level cache

// Intermediate values of one block. The first loop below has no branches and becomes vector code;
// the second one, which has a data-dependent address, stays scalar.
struct Block {
  float ratio[kBlockTokens];
  double ratio_units[kBlockTokens];
  double contribution_units[kBlockTokens];
};

BAPO_HD void quantise(const ContributionsParams& tokens, int64_t begin, int64_t count,
                      WeightKind weight, Block& block) {
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

BAPO_HD void add_to_table(const ContributionsParams& tokens, int64_t begin, int64_t count,
                          const Block& block, int64_t* table) {
  const ClipGrid& grid = tokens.grid;
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

struct ContributionLoop {
  const ContributionsParams& params;
  int64_t* table;

  BAPO_HD void operator()(int64_t begin, int64_t end) const {
    Block block;
    for (int64_t start = begin; start < end; start += kBlockTokens) {
      const int64_t count = end - start < kBlockTokens ? end - start : kBlockTokens;
      // One loop per kind, so that neither has a branch inside.
      if (params.weight == WeightKind::kUniform) {
        quantise(params, start, count, WeightKind::kUniform, block);
      } else {
        quantise(params, start, count, WeightKind::kBehaviourProb, block);
      }
      add_to_table(params, start, count, block, table);
    }
  }
};

struct RatioLoop {
  const ImportanceRatioParams& params;

  BAPO_HD void operator()(int64_t begin, int64_t end) const {
    const float* logprob = params.logprob;
    const float* behaviour = params.behaviour_logprob;
    float* ratio = params.ratio;
    for (int64_t t = begin; t < end; ++t) {
      ratio[t] = importance_ratio_or_nan(logprob[t], behaviour[t]);
    }
  }
};

#if defined(__x86_64__)
#if defined(__clang__)
#define BAPO_TARGET_AVX512 "avx2,fma,avx512f,avx512dq,avx512vl"
#else
#define BAPO_TARGET_AVX512 "avx2,fma,avx512f,avx512dq,avx512vl,prefer-vector-width=512"
#endif

template <typename Loop>
__attribute__((target("avx2,fma"))) void run_avx2(const Loop& loop, int64_t begin, int64_t end) {
  loop(begin, end);
}

template <typename Loop>
__attribute__((target(BAPO_TARGET_AVX512))) void run_avx512(const Loop& loop, int64_t begin,
                                                            int64_t end) {
  loop(begin, end);
}
#endif

// The loop is inlined into code for each instruction set.
template <typename Loop>
void run(const Loop& loop, Isa isa, int64_t begin, int64_t end) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return run_avx512(loop, begin, end);
  if (isa == Isa::kAvx2) return run_avx2(loop, begin, end);
#endif
  static_cast<void>(isa);
  loop(begin, end);
}

}  // namespace

void add_contributions(const ContributionsParams& params, Isa isa, int64_t begin, int64_t end,
                       int64_t* table) {
  run(ContributionLoop{params, table}, isa, begin, end);
}

void importance_ratios(const ImportanceRatioParams& params, Isa isa, int64_t begin, int64_t end) {
  run(RatioLoop{params}, isa, begin, end);
}

}  // namespace bapo
