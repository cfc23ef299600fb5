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
template <KlDirection kDirection>
struct ThreadKlSums {
  ThreadSums student;
  ThreadSums teacher;
  float cross[2];
  float floored;
  float scale;
  float student_shift;
  float teacher_shift;

  __device__ __forceinline__ ThreadKlSums(const KlSums& sums, float scale)
      : student(sums.student),
        teacher(sums.teacher),
        cross{sums.cross.cross, 0.0f},
        floored(sums.cross.floored),
        scale(scale),
        student_shift(shift_of(sums.student.max, scale)),
        teacher_shift(shift_of(sums.teacher.max, scale)) {}

  __device__ __forceinline__ void add(float logit, float teacher_logit, int half) {
    const float e = fused_multiply_add(logit, scale, -student_shift);
    const float teacher_e = fused_multiply_add(teacher_logit, scale, -teacher_shift);
    const float power = student.add(clamp_exponent(e), half);
    const float teacher_power = teacher.add(clamp_exponent(teacher_e), half);
    if constexpr (kDirection == KlDirection::kReverse) {
      add_cross(power, e, teacher_e, half);
    } else {
      add_cross(teacher_power, teacher_e, e, half);
    }
  }

  __device__ __forceinline__ KlSums total(float max, float teacher_max) const {
    const ShiftedSums student_total = student.total(max);
    const ShiftedSums teacher_total = teacher.total(teacher_max);
    const bool is_reverse = kDirection == KlDirection::kReverse;
    const float sum = is_reverse ? student_total.sum : teacher_total.sum;
    return {student_total, teacher_total, {sum, cross[0] + cross[1], floored}};
  }

 private:
  __device__ __forceinline__ void add_cross(float power, float first, float second, int half) {
    const bool has_floor = second == -kInfinity;
    const float difference = clamp_exponent(first) - (has_floor ? kMinExponent : second);
    cross[half] = fused_multiply_add(power, difference, cross[half]);
    floored += has_floor ? power : 0.0f;
  }
};

// The same sums relative to larger maxima.
template <KlDirection kDirection>
__device__ __forceinline__ KlSums rescale(const KlSums& sums, float max, float teacher_max,
                                          float scale) {
  const float step = reference_step(sums.student.max, max, scale);
  const float teacher_step = reference_step(sums.teacher.max, teacher_max, scale);
  const bool is_reverse = kDirection == KlDirection::kReverse;
  return {rescale(sums.student, max, scale), rescale(sums.teacher, teacher_max, scale),
          move_in_base_2(sums.cross, is_reverse ? step : teacher_step,
                         is_reverse ? teacher_step : step)};
}

// As sum_row of logprob_partials.cu, whose bits the student's sums have: the teacher's columns are
// taken with the student's, whatever the alignment of its own row.
template <KlDirection kDirection, typename Element>
__device__ __forceinline__ KlSums sum_rows(const Element* row, const Element* teacher_row,
                                           int num_columns, float scale) {
  __shared__ float max_scratch[2][kSumWarps];
  __shared__ float teacher_scratch[2][kSumWarps];
  const RowLayout layout =
      row_layout(reinterpret_cast<uint64_t>(row), num_columns, static_cast<int>(sizeof(Element)));
  const Element* teacher_body = teacher_row + layout.num_head;
  const bool is_aligned = reinterpret_cast<uint64_t>(teacher_body) % kVectorBytes == 0;
  const int num_parts = num_pieces(layout.num_vectors, kPieceSize);
  const int thread = static_cast<int>(threadIdx.x);

  KlSums total = {empty_sums(), empty_sums(), {0.0f, 0.0f, 0.0f}};
  for (int index = 0; index < num_parts; ++index) {
    const ThreadVectors mine = thread_vectors(layout.num_vectors, kPieceSize, index, thread);
    const Piece piece = load_piece(row + layout.num_head, true, mine);
    const Piece teacher_piece = load_piece(teacher_body, is_aligned, mine);
    const bool has_scalar = index == 0 && thread < num_scalars(layout);
    float scalar = -kInfinity;
    float teacher_scalar = -kInfinity;
    if (has_scalar) {
      scalar = Word<Element>::load(row + scalar_column(layout, thread));
      teacher_scalar = Word<Element>::load(teacher_row + scalar_column(layout, thread));
    }

    float max = fmaxf(fmaxf(total.student.max, scalar), piece.max<Element>());
    float teacher_max =
        fmaxf(fmaxf(total.teacher.max, teacher_scalar), teacher_piece.max<Element>());
    max = block_max(max, max_scratch[index % 2]);
    teacher_max = block_max(teacher_max, teacher_scratch[index % 2]);

    ThreadKlSums<kDirection> sums(rescale<kDirection>(total, max, teacher_max, scale), scale);
    if (has_scalar) sums.add(scalar, teacher_scalar, 1);
#pragma unroll
    for (int i = 0; i < kVectorsPerPiece; ++i) {
      if (piece.has(i)) {
        float values[kVectorLength<Element>];
        float teacher_values[kVectorLength<Element>];
        unpack_vector<Element>(piece.vectors[i], values);
        unpack_vector<Element>(teacher_piece.vectors[i], teacher_values);
#pragma unroll
        for (int j = 0; j < kVectorLength<Element>; ++j) {
          sums.add(values[j], teacher_values[j], j % 2);
        }
      }
    }
    total = sums.total(max, teacher_max);
  }
  return total;
}

// Per token t, with x and x' its rows' true columns and d, d' = (x - max x) / temperature of both
// (common/kl.h): partials[t] = {max x, sum e^d, sum e^d d, x_target or 0 where another rank has it,
// max x', sum e^d', sum e^d (d - d') of the first row, sum e^d where d' has its floor}.
// NaN in all eight if the target is out of range, without reading anything.
// Grid: one block of kSumThreads per token. student and teacher [T, V], target [T], partials [T,
// 8].
template <typename Element, KlDirection kDirection>
__global__ void __launch_bounds__(kSumThreads, kBlocksPerProcessor)
    kl_partials_kernel(const __grid_constant__ KlPartialsParams params, float scale) {
  __shared__ float scratch[5][kSumWarps];
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
  const int num_columns = static_cast<int>(num_true_columns(student));
  const int64_t target_column = target - student.vocab_start;
  float target_logit = 0.0f;
  if (threadIdx.x == 0 && target_column >= 0 && target_column < num_columns) {
    target_logit = Word<Element>::load(row + target_column);
  }

  KlSums sums = sum_rows<kDirection>(row, teacher_row, num_columns, scale);
  float values[5] = {sums.student.sum, sums.student.weighted, sums.teacher.sum, sums.cross.cross,
                     sums.cross.floored};
  block_sums(values, scratch);
  if (threadIdx.x != 0) return;
  sums.student = {sums.student.max, values[0], values[1]};
  sums.teacher = {sums.teacher.max, values[2], 0.0f};
  const bool is_reverse = kDirection == KlDirection::kReverse;
  sums.cross = {is_reverse ? values[0] : values[2], values[3], values[4]};
  const KlPartials partials = finish_kl_partials(sums, target_logit, scale, kDirection);
  out[0] = make_float4(partials.student.max, partials.student.sum, partials.student.weighted,
                       partials.student.target);
  out[1] =
      make_float4(partials.teacher_max, partials.teacher_sum, partials.cross, partials.floored);
}

}  // namespace
}  // namespace bapo

extern "C" int bapo_launch_kl_partials(const bapo::KlPartialsParams* params, void* stream) {
  if (params->num_tokens == 0) return cudaSuccess;
  if (params->student.num_columns > bapo::kMaxColumns) return cudaErrorInvalidValue;
  const float scale = bapo::exponent_scale(params->student.temperature);
  return bapo::dispatch_kl(params->student.type, params->direction, [&](auto element, auto kind) {
    return bapo::launch(bapo::kl_partials_kernel<decltype(element), kind.value>, params->num_tokens,
                        bapo::kSumThreads, stream, *params, scale);
  });
}
