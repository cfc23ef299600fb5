// Partials of a student's and a teacher's rows and of their divergence, each true logit read once.
#include "cuda/device.cuh"
#include "cuda/launch.h"
#include "cuda/logits.cuh"
#include "cuda/row_pieces.cuh"

namespace bapo {
namespace {

// At 128 registers per thread: a piece of each row.
constexpr int kBlocksPerProcessor = 2;

// One thread's sums over the columns of both rows.
struct ThreadKlSums {
  ThreadSums first;
  ThreadSums second;
  float cross[2];
  float floored;
  float scale;
  float first_shift;
  float second_shift;

  __device__ __forceinline__ ThreadKlSums(const KlSums& sums, float scale)
      : first(sums.first),
        second(sums.second),
        cross{sums.cross.cross, 0.0f},
        floored(sums.cross.floored),
        scale(scale),
        first_shift(shift_of(sums.first.max, scale)),
        second_shift(shift_of(sums.second.max, scale)) {}

  __device__ __forceinline__ void add(float first_logit, float second_logit, int half) {
    const float e = clamp_exponent(fused_multiply_add(first_logit, scale, -first_shift));
    const float other = fused_multiply_add(second_logit, scale, -second_shift);
    const float power = first.add(e, half);
    second.add(clamp_exponent(other), half);
    const bool has_floor = other == -kInfinity;
    cross[half] = fused_multiply_add(power, e - (has_floor ? kMinExponent : other), cross[half]);
    floored += has_floor ? power : 0.0f;
  }

  __device__ __forceinline__ KlSums total(float first_max, float second_max) const {
    const ShiftedSums sums = first.total(first_max);
    return {sums, second.total(second_max), {sums.sum, cross[0] + cross[1], floored}};
  }
};

// The same sums relative to larger maxima.
__device__ __forceinline__ KlSums rescale(const KlSums& sums, float first_max, float second_max,
                                          float scale) {
  return {rescale(sums.first, first_max, scale), rescale(sums.second, second_max, scale),
          move_references(sums.cross, reference_step(sums.first.max, first_max, scale),
                          reference_step(sums.second.max, second_max, scale))};
}

// As sum_row of logprob_partials.cu, with the layout of the student's row, so that its sums have
// the same bits; the other row may have its own alignment.
template <typename Element>
__device__ __forceinline__ KlSums sum_rows(const Element* first, const Element* second,
                                           const RowLayout& layout, float scale) {
  __shared__ float first_scratch[2][kSumWarps];
  __shared__ float second_scratch[2][kSumWarps];
  const int num_parts = num_pieces(layout.num_vectors, kPieceSize);
  const int thread = static_cast<int>(threadIdx.x);

  KlSums total = {empty_sums(), empty_sums(), {0.0f, 0.0f, 0.0f}};
  for (int index = 0; index < num_parts; ++index) {
    const ThreadVectors mine = thread_vectors(layout.num_vectors, kPieceSize, index, thread);
    const Piece first_piece = load_piece(first + layout.num_head, mine);
    const Piece second_piece = load_piece(second + layout.num_head, mine);
    const bool has_scalar = index == 0 && thread < num_scalars(layout);
    const int column = has_scalar ? scalar_column(layout, thread) : 0;
    const float first_scalar = has_scalar ? Word<Element>::load(first + column) : -kInfinity;
    const float second_scalar = has_scalar ? Word<Element>::load(second + column) : -kInfinity;

    const float first_max =
        block_max(fmaxf(fmaxf(total.first.max, first_scalar), first_piece.max<Element>()),
                  first_scratch[index % 2]);
    const float second_max =
        block_max(fmaxf(fmaxf(total.second.max, second_scalar), second_piece.max<Element>()),
                  second_scratch[index % 2]);
    ThreadKlSums sums(rescale(total, first_max, second_max, scale), scale);
    if (has_scalar) sums.add(first_scalar, second_scalar, 1);
#pragma unroll
    for (int i = 0; i < kVectorsPerPiece; ++i) {
      if (first_piece.has(i)) {
        float first_values[kVectorLength<Element>];
        float second_values[kVectorLength<Element>];
        unpack_vector<Element>(first_piece.vectors[i], first_values);
        unpack_vector<Element>(second_piece.vectors[i], second_values);
#pragma unroll
        for (int j = 0; j < kVectorLength<Element>; ++j) {
          sums.add(first_values[j], second_values[j], j % 2);
        }
      }
    }
    total = sums.total(first_max, second_max);
  }
  return total;
}

// Per token t, with x and x' its rows' true columns and d, d' = (x - max x) / temperature of both
// (common/kl.h): partials[t] = {max x, sum e^d, sum e^d d, x_target or 0 where another rank has it,
// max x', sum e^d', sum e^d (d - d') of the first row, sum e^d where d' has its floor}.
// NaN in all eight if the target is out of range, without reading anything.
// Grid: one block of kSumThreads per token. student and teacher [T, V], target [T], partials [T,
// 8].
template <typename Element>
__global__ void __launch_bounds__(kSumThreads, kBlocksPerProcessor)
    kl_partials_kernel(const __grid_constant__ KlPartialsParams params, float scale) {
  __shared__ float scratch[6][kSumWarps];
  const Logits& student = params.student;
  const int64_t token = blockIdx.x;
  const int64_t target = params.target[token];
  float4* out = reinterpret_cast<float4*>(params.partials) + 2 * token;
  if (target < 0 || target >= student.vocab_size) {
    if (threadIdx.x < 2) out[threadIdx.x] = make_float4(kNaN, kNaN, kNaN, kNaN);
    return;
  }

  const Element* row = static_cast<const Element*>(student.data) + token * student.row_stride;
  const Element* teacher_row =
      static_cast<const Element*>(params.teacher.data) + token * params.teacher.row_stride;
  const int column = local_column(student, target);
  const float target_logit =
      threadIdx.x == 0 && column >= 0 ? Word<Element>::load(row + column) : 0.0f;

  const RowLayout layout =
      row_layout(reinterpret_cast<uint64_t>(row), static_cast<int>(num_true_columns(student)),
                 static_cast<int>(sizeof(Element)));
  const bool is_reverse = params.direction == KlDirection::kReverse;
  KlSums sums =
      sum_rows(is_reverse ? row : teacher_row, is_reverse ? teacher_row : row, layout, scale);
  float values[6] = {sums.first.sum,       sums.first.weighted, sums.second.sum,
                     sums.second.weighted, sums.cross.cross,    sums.cross.floored};
  block_sums(values, scratch);
  if (threadIdx.x != 0) return;
  sums = {{sums.first.max, values[0], values[1]},
          {sums.second.max, values[2], values[3]},
          {values[0], values[4], values[5]}};
  const KlPartials result = finish_kl_partials(sums, target_logit, scale, params.direction);
  const Partials& part = result.student;
  out[0] = make_float4(part.max, part.sum, part.weighted, part.target);
  out[1] = make_float4(result.teacher_max, result.teacher_sum, result.cross, result.floored);
}

}  // namespace
}  // namespace bapo

extern "C" int bapo_launch_kl_partials(const bapo::KlPartialsParams* params, void* stream) {
  if (params->num_tokens == 0) return cudaSuccess;
  if (params->student.num_columns > bapo::kMaxColumns) return cudaErrorInvalidValue;
  const float scale = bapo::exponent_scale(params->student.temperature);
  return bapo::dispatch_element(params->student.type, [&](auto element) {
    return bapo::launch(bapo::kl_partials_kernel<decltype(element)>, params->num_tokens,
                        bapo::kSumThreads, stream, *params, scale);
  });
}
