// Partials of the selected rows, each true logit read once.
#include "cuda/device.cuh"
#include "cuda/launch.h"
#include "cuda/logits.cuh"
#include "cuda/row_pieces.cuh"

namespace bapo {
namespace {

// At 64 registers per thread; one block's loads then overlap with another's exponentials.
constexpr int kBlocksPerProcessor = 4;

__device__ __forceinline__ float exponent(float logit, float scale, float shift) {
  return clamp_exponent(fused_multiply_add(logit, scale, -shift));
}

// Sums of the whole row, in every thread: pass after pass over pieces that fit the registers, with
// the exact maximum of the piece known before its exponentials.
template <typename Element>
__device__ __forceinline__ ShiftedSums sum_row(const Element* row, int num_columns, float scale) {
  __shared__ float max_scratch[2][kSumWarps];
  const RowLayout layout =
      row_layout(reinterpret_cast<uint64_t>(row), num_columns, static_cast<int>(sizeof(Element)));
  const int num_parts = num_pieces(layout.num_vectors, kPieceSize);
  const int thread = static_cast<int>(threadIdx.x);

  ShiftedSums total = empty_sums();
  for (int index = 0; index < num_parts; ++index) {
    const Piece piece = load_piece<true>(
        row + layout.num_head, thread_vectors(layout.num_vectors, kPieceSize, index, thread));
    const bool has_scalar = index == 0 && thread < num_scalars(layout);
    const float scalar =
        has_scalar ? Word<Element>::load(row + scalar_column(layout, thread)) : -kInfinity;

    float max = fmaxf(fmaxf(total.max, scalar), piece.max<Element>());
    // Two scratches in turn: the barrier of the next piece lies between two uses of one.
    max = block_max(max, max_scratch[index % 2]);
    total = rescale(total, max, scale);

    const float shift = shift_of(max, scale);
    ThreadSums sums(total);
    if (has_scalar) sums.add(exponent(scalar, scale, shift), 1);
#pragma unroll
    for (int i = 0; i < kVectorsPerPiece; ++i) {
      if (piece.has(i)) {
        float values[kVectorLength<Element>];
        unpack_vector<Element>(piece.vectors[i], values);
#pragma unroll
        for (int j = 0; j < kVectorLength<Element>; ++j) {
          sums.add(exponent(values[j], scale, shift), j % 2);
        }
      }
    }
    total = sums.total(max);
  }
  return total;
}

// Per token t, with x its row's true columns and k = log2(e) / temperature (common/logprob.h):
//   partials[t] = {max x, sum e^((x - max) / temperature), the same weighted by (x - max) /
//   temperature, x_target or 0 where another rank has it}.
// NaN in all four if the row or the target is out of range, without reading anything.
// scale is k, divided once on the host.
// Grid: one block of kSumThreads per token. logits [N, V], rows and target [T], partials [T, 4].
template <typename Element>
__global__ void __launch_bounds__(kSumThreads, kBlocksPerProcessor)
    logprob_partials_kernel(const __grid_constant__ LogprobPartialsParams params, float scale) {
  __shared__ float scratch[2][kSumWarps];
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
  const int column = local_column(logits, target);
  // Loaded before the row, so that its latency is hidden.
  const float target_logit =
      threadIdx.x == 0 && column >= 0 ? Word<Element>::load(row + column) : 0.0f;

  const ShiftedSums sums = sum_row(row, num_columns, scale);
  float values[2] = {sums.sum, sums.weighted};
  block_sums(values, scratch);
  if (threadIdx.x != 0) return;
  const ShiftedSums total = {sums.max, values[0], values[1]};
  const Partials partials = finish_partials(total, target_logit, scale);
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
                        bapo::kSumThreads, stream, *params, scale);
  });
}
