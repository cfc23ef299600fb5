// Adds the tokens' contributions to the table: exact integers, so the order of additions is free.
#include "common/contribution.h"
#include "cuda/device.cuh"
#include "cuda/launch.h"

namespace bapo {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kTokensPerThread = 4;  // fewer blocks, fewer global additions
constexpr int64_t kMaxBlocks = 512;

// Most ratios lie near 1, so most tokens fall into two bins. Those two are summed in registers:
// a 64-bit atomic in shared memory is a loop that spins while others write the same word.
struct Crowded {
  unsigned long long slots[kSlotsPerBin];
};

__device__ __forceinline__ void add(int64_t* slot, unsigned long long value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(slot), value);
}

// What one thread keeps in registers.
struct ThreadTable {
  Crowded upper;  // the bin below the first upper candidate
  Crowded lower;  // the lower bin of r = 1
  unsigned long long num_positive;
  unsigned long long num_negative;
};

struct SharedTable {
  ClipGrid grid;
  int64_t slots[kMaxSlots];
};

__device__ __forceinline__ void add_contribution(float advantage, float ratio, double units,
                                                 int crowded_lower, SharedTable& shared,
                                                 ThreadTable& thread) {
  const uint64_t a = static_cast<uint64_t>(static_cast<int64_t>(units));
  const uint64_t q = static_cast<uint64_t>(static_cast<int64_t>(ratio_units(ratio)));
  const uint128 product = static_cast<uint128>(a) * q;
  const unsigned long long parts[kSlotsPerBin] = {a, static_cast<uint32_t>(product),
                                                  static_cast<uint32_t>(product >> 32),
                                                  static_cast<uint64_t>(product >> 64)};
  const int offset = bin_offset(shared.grid, advantage > 0.0f, ratio);
  if (offset == 0) {
#pragma unroll
    for (int i = 0; i < kSlotsPerBin; ++i) thread.upper.slots[i] += parts[i];
  } else if (offset == crowded_lower) {
#pragma unroll
    for (int i = 0; i < kSlotsPerBin; ++i) thread.lower.slots[i] += parts[i];
  } else {
#pragma unroll
    for (int i = 0; i < kSlotsPerBin; ++i) {
      if (parts[i] != 0) add(shared.slots + offset + i, parts[i]);
    }
  }
}

// The rules of csrc/cpu/token_loops.cpp, in the same order.
__device__ __forceinline__ void add_token(const ContributionsParams& params, int64_t token,
                                          int crowded_lower, SharedTable& shared,
                                          ThreadTable& thread) {
  const float mask = params.mask[token];
  if (mask == 0.0f) return;
  const float logprob = params.logprob[token];
  const float behaviour = params.behaviour_logprob[token];
  const float advantage = params.advantage[token];
  int64_t* counters = shared.slots + counter_offset(shared.grid);
  if (!(is_finite(logprob) && is_finite(behaviour) && is_finite(advantage) && is_finite(mask))) {
    add(counters + kNonFinite, 1);
    return;
  }
  thread.num_positive += advantage > 0.0f ? 1 : 0;
  thread.num_negative += advantage < 0.0f ? 1 : 0;
  const double units = contribution_units(weighted_advantage(advantage, behaviour, params.weight));
  if (mask != 1.0f || units >= kContributionLimit) {
    add(counters + kOutOfRange, 1);
    return;
  }
  if (units == 0.0) return;
  add_contribution(advantage, importance_ratio(logprob, behaviour), units, crowded_lower, shared,
                   thread);
}

// A warp's sum, added once.
__device__ __forceinline__ void flush(unsigned long long value, int64_t* slot) {
  value = warp_sum(value);
  if (threadIdx.x % kWarpSize == 0 && value != 0) add(slot, value);
}

__device__ __forceinline__ void flush(const ThreadTable& thread, int crowded_lower,
                                      SharedTable& shared) {
#pragma unroll
  for (int i = 0; i < kSlotsPerBin; ++i) {
    flush(thread.upper.slots[i], shared.slots + i);
    flush(thread.lower.slots[i], shared.slots + crowded_lower + i);
  }
  int64_t* counters = shared.slots + counter_offset(shared.grid);
  flush(thread.num_positive, counters + kPositive);
  flush(thread.num_negative, counters + kNegative);
}

// table += a and a q of each token with mask 1 at its bin, and the counters
// (common/contribution.h). Grid: at most kMaxBlocks blocks of kThreads that stride over the tokens;
// each adds in shared memory, then once to the table. Token arrays [T], table [num_slots(grid)].
__global__ void __launch_bounds__(kThreads)
    contributions_kernel(const __grid_constant__ ContributionsParams params) {
  __shared__ SharedTable shared;
  const int size = num_slots(params.grid);
  if (threadIdx.x == 0) {
    shared.grid.num_upper = params.grid.num_upper;
    shared.grid.num_lower = params.grid.num_lower;
    shared.grid.has_dual_clip = params.grid.has_dual_clip;
    shared.grid.order = params.grid.order;
  }
  for (int i = threadIdx.x; i < params.grid.num_upper; i += kThreads) {
    shared.grid.upper[i] = params.grid.upper[i];
  }
  for (int i = threadIdx.x; i < num_lower_edges(params.grid); i += kThreads) {
    shared.grid.lower[i] = params.grid.lower[i];
  }
  for (int i = threadIdx.x; i < size; i += kThreads) shared.slots[i] = 0;
  __syncthreads();

  const int crowded_lower = bin_offset(shared.grid, false, 1.0f);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  ThreadTable thread = {};
  for (int64_t token = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       token < params.num_tokens; token += step) {
    add_token(params, token, crowded_lower, shared, thread);
  }
  flush(thread, crowded_lower, shared);
  __syncthreads();
  for (int i = threadIdx.x; i < size; i += kThreads) {
    if (shared.slots[i] != 0) {
      add(params.table + i, static_cast<unsigned long long>(shared.slots[i]));
    }
  }
}

}  // namespace
}  // namespace bapo

extern "C" int bapo_launch_contributions(const bapo::ContributionsParams* params, void* stream) {
  if (params->num_tokens == 0) return cudaSuccess;
  const int64_t wanted =
      bapo::ceil_divide(params->num_tokens, bapo::kThreads * bapo::kTokensPerThread);
  const int64_t num_blocks = wanted < bapo::kMaxBlocks ? wanted : bapo::kMaxBlocks;
  return bapo::launch(bapo::contributions_kernel, num_blocks, bapo::kThreads, stream, *params);
}
