// How an op is registered, and how it calls its CUDA launcher. Each op is one function for all
// devices: check, allocate, return if empty, launch where the tensors are on a GPU, else loop.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstdint>

#include "cpu/token_loops.h"
#include "torch_ops/cuda_launch.h"

namespace bapo {

// Tokens of a task that merges partials.
constexpr int64_t kCombinedTokensPerTask = 1024;

// Calls loop(begin, end) on torch's threads; at once where a thread would cost more than it saves.
template <typename Loop>
void for_each_token_range(int64_t num_tokens, const Loop& loop) {
  if (num_tokens <= kMinTokensPerThread) return loop(0, num_tokens);
  torch::stable::parallel_for(0, num_tokens, kMinTokensPerThread, loop);
}

}  // namespace bapo

#if defined(BAPO_WITH_CUDA)
// Queues the kernel and is true if the tensor is on a GPU.
#define BAPO_LAUNCHED(op, launcher, tensor, params) ::bapo::launched(#op, launcher, tensor, params)
#define BAPO_REGISTER_OP(op, function) \
  BAPO_REGISTER_FOR(CPU, op, function) \
  BAPO_REGISTER_FOR(CUDA, op, function)
#else
#define BAPO_LAUNCHED(op, launcher, tensor, params) false
#define BAPO_REGISTER_OP(op, function) BAPO_REGISTER_FOR(CPU, op, function)
#endif

#define BAPO_REGISTER_FOR(device, op, function)      \
  STABLE_TORCH_LIBRARY_IMPL(bapo, device, library) { \
    library.impl(#op, TORCH_BOX(&::bapo::function)); \
  }
