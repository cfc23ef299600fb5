// Partials of the selected rows, each true logit read once.
#include "cuda/device.cuh"
#include "cuda/launch.h"
#include "cuda/logits.cuh"

namespace bapo {
namespace {

constexpr int kThreads = 256;
constexpr int kNumWarps = kThreads / kWarpSize;
// 16-byte vectors that a thread keeps in registers: 256 * 10 of them hold 20,480 16-bit columns.
constexpr int kVectorsPerThread = 10;
constexpr int kPieceSize = kThreads * kVectorsPerThread;
// At 64 registers per thread; one block's loads then overlap with another's exponentials.
constexpr int kBlocksPerProcessor = 4;

// One thread's sums in two halves, relative to 2^shift; two chains of additions are in flight.
struct ThreadSums {
  float sum[2];
  float weighted[2];
};

__device__ __forceinline__ void add_logit(float logit, float scale, float shift, int half,
                                          ThreadSums& sums) {
  const float e2 = clamp_exponent(fused_multiply_add(logit, scale, -shift));
  const float power = exp2_approx(e2);
  sums.sum[half] += power;
  sums.weighted[half] = fused_multiply_add(power, e2, sums.weighted[half]);
}

// A thread's vectors of one piece of a row.
struct Piece {
  uint4 vectors[kVectorsPerThread];
  int num_left;

  __device__ __forceinline__ bool has(int i) const { return i * kThreads < num_left; }
};

__device__ __forceinline__ Piece load_piece(const uint4* body, const ThreadVectors& mine) {
  Piece piece;
  piece.num_left = mine.num_left;
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
    if (piece.has(i)) piece.vectors[i] = __ldcs(body + mine.first + i * kThreads);
  }
  return piece;
}

// Sums of the whole row, in every thread: pass after pass over pieces that fit the registers, with
// the exact maximum of the piece known before its exponentials.
template <typename Element>
__device__ __forceinline__ ShiftedSums sum_row(const Element* row, int num_columns, float scale) {
  __shared__ float max_scratch[2][kNumWarps];
  const RowLayout layout =
      row_layout(reinterpret_cast<uint64_t>(row), num_columns, static_cast<int>(sizeof(Element)));
  const uint4* body = reinterpret_cast<const uint4*>(row + layout.num_head);
  const int num_parts = num_pieces(layout.num_vectors, kPieceSize);
  const int thread = static_cast<int>(threadIdx.x);

  ShiftedSums total = empty_sums();
  for (int index = 0; index < num_parts; ++index) {
    const Piece piece =
        load_piece(body, thread_vectors(layout.num_vectors, kPieceSize, index, thread));
    const bool has_scalar = index == 0 && thread < num_scalars(layout);
    const float scalar =
        has_scalar ? Word<Element>::load(row + scalar_column(layout, thread)) : -kInfinity;

    RunningMax<Element> vector_max;
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
      if (piece.has(i)) vector_max.add(piece.vectors[i]);
    }
    float max = fmaxf(fmaxf(total.max, scalar), vector_max.result());
    // Two scratches in turn: the barrier of the next piece lies between two uses of one.
    max = block_max(max, max_scratch[index % 2]);
    total = rescale(total, max, scale);

    // With nothing but -inf so far any shift gives zeros; -inf itself would give NaN.
    const float shift = max == -kInfinity ? 0.0f : max * scale;
    ThreadSums sums = {{total.sum, 0.0f}, {total.weighted, 0.0f}};
    if (has_scalar) add_logit(scalar, scale, shift, 1, sums);
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
      if (piece.has(i)) {
        float values[kVectorLength<Element>];
        unpack_vector<Element>(piece.vectors[i], values);
#pragma unroll
        for (int j = 0; j < kVectorLength<Element>; ++j) {
          add_logit(values[j], scale, shift, j % 2, sums);
        }
      }
    }
    total.sum = sums.sum[0] + sums.sum[1];
    total.weighted = sums.weighted[0] + sums.weighted[1];
  }
  return total;
}

// Per token t, with x its row's true columns and k = log2(e) / temperature (common/logprob.h):
//   partials[t] = {max x, sum e^((x - max) / temperature), the same weighted by (x - max) /
//   temperature, x_target or 0 where another rank has it}.
// NaN in all four if the row or the target is out of range, without reading anything.
// scale is k, divided once on the host.
// Grid: one block of kThreads per token. logits [N, V], rows and target [T], partials [T, 4].
template <typename Element>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    logprob_partials_kernel(const __grid_constant__ LogprobPartialsParams params, float scale) {
  __shared__ float sum_scratch[kNumWarps];
  __shared__ float weighted_scratch[kNumWarps];
  const Logits& logits = params.logits;
  const int64_t token = blockIdx.x;
  const int64_t row_index = params.rows == nullptr ? token : params.rows[token];
  const int64_t target = params.target[token];
  float4* out = reinterpret_cast<float4*>(params.partials) + token;
  if (row_index < 0 || row_index >= logits.num_rows || target < 0 || target >= logits.vocab_size) {
    if (threadIdx.x == 0) *out = make_float4(kNaN, kNaN, kNaN, kNaN);
    return;
  }

  const Element* row = static_cast<const Element*>(logits.data) + row_index * logits.row_stride;
  const int num_columns = static_cast<int>(num_true_columns(logits));
  const int64_t target_column = target - logits.vocab_start;
  float target_logit = 0.0f;
  // Loaded before the row, so that its latency is hidden.
  if (threadIdx.x == 0 && target_column >= 0 && target_column < num_columns) {
    target_logit = Word<Element>::load(row + target_column);
  }

  ShiftedSums sums = sum_row(row, num_columns, scale);
  sums.sum = warp_sum(sums.sum);
  sums.weighted = warp_sum(sums.weighted);
  if (threadIdx.x % kWarpSize == 0) {
    sum_scratch[threadIdx.x / kWarpSize] = sums.sum;
    weighted_scratch[threadIdx.x / kWarpSize] = sums.weighted;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int warp = 1; warp < kNumWarps; ++warp) {
    sums.sum += sum_scratch[warp];
    sums.weighted += weighted_scratch[warp];
  }
  const Partials partials = finish_partials(sums, target_logit, scale);
  *out = make_float4(partials.max, partials.sum, partials.weighted, partials.target);
}

}  // namespace
}  // namespace bapo

extern "C" int bapo_launch_logprob_partials(const bapo::LogprobPartialsParams* params,
                                            void* stream) {
  if (params->num_tokens == 0) return cudaSuccess;
  if (params->logits.num_columns > bapo::kMaxColumns) return cudaErrorInvalidValue;
  const float scale = bapo::exponent_scale(params->logits.temperature);
  return bapo::dispatch_element(params->logits.type, [&](auto element) {
    return bapo::launch(bapo::logprob_partials_kernel<decltype(element)>, params->num_tokens,
                        bapo::kThreads, stream, *params, scale);
  });
}
