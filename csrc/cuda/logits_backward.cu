// Overwrites logits with their gradient: each selected logit read and written once, zeros
// elsewhere.
#include "cuda/device.cuh"
#include "cuda/launch.h"
#include "cuda/logits.cuh"
#include "cuda/overwrite_row.cuh"

namespace bapo {
namespace {

constexpr int kMapThreads = 256;
constexpr int kBlocksPerProcessor = 5;

// In token_of_row, beside tokens.
constexpr int kNoToken = -1;
constexpr int kSeveralTokens = -2;

// token_of_row[row] = its token; kSeveralTokens where two select it, whatever their order. Rows out
// of range are left out.
// Grid: one thread per token. rows [T], token_of_row [N], kNoToken before.
__global__ void __launch_bounds__(kMapThreads)
    map_rows_kernel(const __grid_constant__ LogitsBackwardParams params) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kMapThreads + threadIdx.x;
  if (token >= params.num_tokens) return;
  const int64_t row = params.rows[token];
  if (row < 0 || row >= params.logits.num_rows) return;
  int* slot = params.token_of_row + row;
  if (atomicCAS(slot, kNoToken, static_cast<int>(token)) != kNoToken) {
    atomicExch(slot, kSeveralTokens);
  }
}

struct RowJob {
  static constexpr bool kHasTeacher = false;

  RowGradient row;
  bool is_zero;
  int target_column;

  __device__ __forceinline__ float at_target() const { return row.at_target; }
  __device__ __forceinline__ float gradient(float logit, float) const {
    return logit_gradient(logit, row);
  }
};

__device__ __forceinline__ RowJob zero_row() { return {{}, true, -1}; }

// A row that several tokens select has NaN for its log-sum, and so for its whole gradient.
__device__ __forceinline__ RowJob row_job(const LogitsBackwardParams& params, int64_t row) {
  const Logits& logits = params.logits;
  int64_t token = row < params.num_tokens ? row : kNoToken;
  if (params.rows != nullptr) token = params.token_of_row[row];
  if (token == kNoToken) return zero_row();
  if (token == kSeveralTokens) {
    return {row_gradient(kNaN, kNaN, kNaN, 1.0f, 0.0f, logits.temperature), false, -1};
  }
  const float grad_logprob = value_or_zero(params.grad_logprob, token);
  const float grad_entropy = value_or_zero(params.grad_entropy, token);
  // The row's values do not matter then: NaN is reported by the loss, not spread from here.
  if (grad_logprob == 0.0f && grad_entropy == 0.0f) return zero_row();
  return {row_gradient(params.max[token], params.log_sum[token], params.entropy[token],
                       grad_logprob, grad_entropy, logits.temperature),
          false, local_column(logits, params.target[token])};
}

// Per row with token t, y its target, p = e^((x - max) / temperature - log_sum) (common/logprob.h):
//   x_j <- ([j = y] - p_j) grad_logprob / temperature
//          - p_j (log p_j + entropy) grad_entropy / temperature,
// computed in float32 and rounded once. Zeros in rows without a token, in padded columns and where
// both gradients are 0; NaN in a row that several tokens select.
// Grid: one block of kOverwriteThreads per row. logits [N, V], token_of_row [N], all else [T].
template <typename Element>
__global__ void __launch_bounds__(kOverwriteThreads, kBlocksPerProcessor)
    logits_backward_kernel(const __grid_constant__ LogitsBackwardParams params) {
  const Logits& logits = params.logits;
  const int64_t row_index = blockIdx.x;
  Element* row = static_cast<Element*>(logits.data) + row_index * logits.row_stride;
  overwrite_row(row, static_cast<const Element*>(nullptr), logits, row_job(params, row_index));
}

cudaError_t map_rows(const LogitsBackwardParams& params, void* stream) {
  static_assert(kNoToken == -1, "a memset of 0xff bytes writes it");
  const size_t num_bytes = static_cast<size_t>(params.logits.num_rows) * sizeof(int32_t);
  const cudaError_t error =
      cudaMemsetAsync(params.token_of_row, 0xff, num_bytes, static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess || params.num_tokens == 0) return error;
  return launch(map_rows_kernel, ceil_divide(params.num_tokens, kMapThreads), kMapThreads, stream,
                params);
}

}  // namespace
}  // namespace bapo

extern "C" int bapo_launch_logits_backward(const bapo::LogitsBackwardParams* params, void* stream) {
  const bapo::Logits& logits = params->logits;
  if (logits.num_rows == 0) return cudaSuccess;
  if (logits.num_columns > bapo::kMaxColumns || params->num_tokens > INT_MAX) {
    return cudaErrorInvalidValue;
  }
  if (params->rows != nullptr) {
    const cudaError_t error = bapo::map_rows(*params, stream);
    if (error != cudaSuccess) return error;
  }
  return bapo::dispatch_element(logits.type, [&](auto element) {
    return bapo::launch(bapo::logits_backward_kernel<decltype(element)>, logits.num_rows,
                        bapo::kOverwriteThreads, stream, *params);
  });
}
