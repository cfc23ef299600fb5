// Overwrites logits with their gradient: each selected logit read and written once, zeros
// elsewhere.
#include "cuda/device.cuh"
#include "cuda/launch.h"
#include "cuda/logits.cuh"

namespace bapo {
namespace {

constexpr int kThreads = 256;
constexpr int kMapThreads = 256;
// Vectors in flight per thread; 5 blocks of 256 threads request 100 kB per multiprocessor.
constexpr int kVectorsPerThread = 5;
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

// What a row becomes: zeros, or the gradient with the target's own term.
struct RowJob {
  RowGradient gradient;
  bool is_zero;
  int target_column;  // of this rank, else -1
};

__device__ __forceinline__ RowJob zero_row() { return {{}, true, -1}; }

// A row that several tokens select has NaN for its log-sum, and so for its whole gradient.
__device__ __forceinline__ RowJob row_job(const LogitsBackwardParams& params, int64_t row,
                                          int num_true) {
  const Logits& logits = params.logits;
  int64_t token = row < params.num_tokens ? row : kNoToken;
  if (params.rows != nullptr) token = params.token_of_row[row];
  if (token == kNoToken) return zero_row();
  if (token == kSeveralTokens) {
    return {row_gradient(kNaN, kNaN, kNaN, 1.0f, 0.0f, logits.temperature), false, -1};
  }
  const float grad_logprob = params.grad_logprob == nullptr ? 0.0f : params.grad_logprob[token];
  const float grad_entropy = params.grad_entropy == nullptr ? 0.0f : params.grad_entropy[token];
  // The row's values do not matter then: NaN is reported by the loss, not spread from here.
  if (grad_logprob == 0.0f && grad_entropy == 0.0f) return zero_row();
  const int64_t column = params.target[token] - logits.vocab_start;
  const bool is_local = column >= 0 && column < num_true;
  return {row_gradient(params.max[token], params.log_sum[token], params.entropy[token],
                       grad_logprob, grad_entropy, logits.temperature),
          false, is_local ? static_cast<int>(column) : -1};
}

// The gradient of one logit, which is padding from num_true on.
__device__ __forceinline__ float column_gradient(float logit, int column, const RowJob& job,
                                                 int num_true) {
  const float gradient = logit_gradient(logit, job.gradient);
  const float at_target = column == job.target_column ? job.gradient.at_target : 0.0f;
  return column < num_true ? gradient + at_target : 0.0f;
}

template <typename Element>
__device__ __forceinline__ uint4 vector_gradient(const uint4& vector, int first_column,
                                                 const RowJob& job, int num_true) {
  constexpr int kLength = kVectorLength<Element>;
  float values[kLength];
  unpack_vector<Element>(vector, values);
  // Few vectors hold the target or padding; the rest goes without two comparisons per element.
  const bool has_target =
      job.target_column >= first_column && job.target_column < first_column + kLength;
  if (has_target || first_column + kLength > num_true) {
#pragma unroll
    for (int j = 0; j < kLength; ++j) {
      values[j] = column_gradient(values[j], first_column + j, job, num_true);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kLength; ++j) values[j] = logit_gradient(values[j], job.gradient);
  }
  return pack_vector<Element>(values);
}

template <typename Element>
__device__ __forceinline__ void write_scalars(Element* row, const RowLayout& layout,
                                              const RowJob& job, int num_true) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread >= num_scalars(layout)) return;
  const int column = scalar_column(layout, thread);
  float gradient = 0.0f;
  if (!job.is_zero) {
    gradient = column_gradient(Word<Element>::load(row + column), column, job, num_true);
  }
  row[column] = Word<Element>::round(gradient);
}

template <typename Element>
__device__ __forceinline__ void write_vectors(uint4* body, const RowLayout& layout,
                                              const RowJob& job, int num_true) {
  const int num_vectors = layout.num_vectors;
  for (int first = static_cast<int>(threadIdx.x); first < num_vectors;
       first += kThreads * kVectorsPerThread) {
    uint4* mine = body + first;
    const int first_column = vector_column(layout, first);
    uint4 vectors[kVectorsPerThread];
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
      if (first + i * kThreads < num_vectors) vectors[i] = __ldcs(mine + i * kThreads);
    }
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
      if (first + i * kThreads < num_vectors) {
        const int column = first_column + i * kThreads * kVectorLength<Element>;
        __stcs(mine + i * kThreads, vector_gradient<Element>(vectors[i], column, job, num_true));
      }
    }
  }
}

__device__ __forceinline__ void zero_vectors(uint4* body, int num_vectors) {
  for (int index = static_cast<int>(threadIdx.x); index < num_vectors; index += kThreads) {
    __stcs(body + index, make_uint4(0, 0, 0, 0));
  }
}

// Per row with token t, y its target, p = e^((x - max) / temperature - log_sum) (common/logprob.h):
//   x_j <- ([j = y] - p_j) grad_logprob / temperature
//          - p_j (log p_j + entropy) grad_entropy / temperature,
// computed in float32 and rounded once. Zeros in rows without a token, in padded columns and where
// both gradients are 0; NaN in a row that several tokens select.
// Grid: one block of kThreads per row. logits [N, V], token_of_row [N], all else [T].
template <typename Element>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    logits_backward_kernel(const __grid_constant__ LogitsBackwardParams params) {
  const Logits& logits = params.logits;
  const int64_t row_index = blockIdx.x;
  const int num_columns = static_cast<int>(logits.num_columns);
  const int num_true = static_cast<int>(num_true_columns(logits));
  Element* row = static_cast<Element*>(logits.data) + row_index * logits.row_stride;
  const RowLayout layout =
      row_layout(reinterpret_cast<uint64_t>(row), num_columns, static_cast<int>(sizeof(Element)));
  uint4* body = reinterpret_cast<uint4*>(row + layout.num_head);

  const RowJob job = row_job(params, row_index, num_true);
  write_scalars(row, layout, job, num_true);
  if (job.is_zero) {
    zero_vectors(body, layout.num_vectors);
  } else {
    write_vectors<Element>(body, layout, job, num_true);
  }
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
                        bapo::kThreads, stream, *params);
  });
}
