// Overwrites a row of logits with its gradient: each logit read and written once.
//
// A Job says what the row becomes: is_zero; target_column of this rank, else -1; at_target(), the
// target's own term; kHasTeacher, whether a teacher's row is read beside it; and
// gradient(logit, teacher_logit) without the target's own term.
#pragma once

#include "cuda/logits.cuh"

namespace bapo {

constexpr int kOverwriteThreads = 256;
// Vectors in flight per thread; 5 blocks of 256 threads request 100 kB per multiprocessor.
constexpr int kVectorsInFlight = 5;

// The gradient of one logit, which is padding from num_true on.
template <typename Job>
__device__ __forceinline__ float column_gradient(float logit, float teacher_logit, int column,
                                                 const Job& job, int num_true) {
  const float gradient = job.gradient(logit, teacher_logit);
  const float at_target = column == job.target_column ? job.at_target() : 0.0f;
  return column < num_true ? gradient + at_target : 0.0f;
}

template <typename Element, typename Job>
__device__ __forceinline__ uint4 vector_gradient(const uint4& vector, const uint4& teacher_vector,
                                                 int first_column, const Job& job, int num_true) {
  constexpr int kLength = kVectorLength<Element>;
  float values[kLength];
  float teacher_values[kLength] = {};
  unpack_vector<Element>(vector, values);
  if constexpr (Job::kHasTeacher) unpack_vector<Element>(teacher_vector, teacher_values);
  // Few vectors hold the target or padding; the rest goes without two comparisons per element.
  const bool has_target =
      job.target_column >= first_column && job.target_column < first_column + kLength;
  if (has_target || first_column + kLength > num_true) {
#pragma unroll
    for (int j = 0; j < kLength; ++j) {
      values[j] = column_gradient(values[j], teacher_values[j], first_column + j, job, num_true);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kLength; ++j) values[j] = job.gradient(values[j], teacher_values[j]);
  }
  return pack_vector<Element>(values);
}

template <typename Element, typename Job>
__device__ __forceinline__ void write_scalars(Element* row, const Element* teacher_row,
                                              const RowLayout& layout, const Job& job,
                                              int num_true) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread >= num_scalars(layout)) return;
  const int column = scalar_column(layout, thread);
  float gradient = 0.0f;
  if (!job.is_zero) {
    float teacher_logit = 0.0f;
    if constexpr (Job::kHasTeacher) teacher_logit = Word<Element>::load(teacher_row + column);
    gradient =
        column_gradient(Word<Element>::load(row + column), teacher_logit, column, job, num_true);
  }
  row[column] = Word<Element>::round(gradient);
}

template <typename Element, typename Job>
__device__ __forceinline__ void write_vectors(uint4* body, const Element* teacher_body,
                                              const RowLayout& layout, const Job& job,
                                              int num_true) {
  const int num_vectors = layout.num_vectors;
  const bool is_aligned = is_at_boundary(teacher_body);
  for (int first = static_cast<int>(threadIdx.x); first < num_vectors;
       first += kOverwriteThreads * kVectorsInFlight) {
    uint4* mine = body + first;
    const Element* teacher_mine = teacher_body + first * kVectorLength<Element>;
    const int first_column = vector_column(layout, first);
    uint4 vectors[kVectorsInFlight];
    uint4 teacher_vectors[Job::kHasTeacher ? kVectorsInFlight : 1];
#pragma unroll
    for (int i = 0; i < kVectorsInFlight; ++i) {
      if (first + i * kOverwriteThreads < num_vectors) {
        vectors[i] = __ldcs(mine + i * kOverwriteThreads);
        if constexpr (Job::kHasTeacher) {
          teacher_vectors[i] = load_vector(
              teacher_mine + i * kOverwriteThreads * kVectorLength<Element>, is_aligned);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kVectorsInFlight; ++i) {
      if (first + i * kOverwriteThreads < num_vectors) {
        const int column = first_column + i * kOverwriteThreads * kVectorLength<Element>;
        __stcs(mine + i * kOverwriteThreads,
               vector_gradient<Element>(vectors[i], teacher_vectors[Job::kHasTeacher ? i : 0],
                                        column, job, num_true));
      }
    }
  }
}

__device__ __forceinline__ void zero_vectors(uint4* body, int num_vectors) {
  for (int index = static_cast<int>(threadIdx.x); index < num_vectors; index += kOverwriteThreads) {
    __stcs(body + index, make_uint4(0, 0, 0, 0));
  }
}

// By one block of kOverwriteThreads. teacher_row: null without a teacher.
template <typename Element, typename Job>
__device__ __forceinline__ void overwrite_row(Element* row, const Element* teacher_row,
                                              const Logits& logits, const Job& job) {
  const int num_columns = static_cast<int>(logits.num_columns);
  const int num_true = static_cast<int>(num_true_columns(logits));
  const RowLayout layout =
      row_layout(reinterpret_cast<uint64_t>(row), num_columns, static_cast<int>(sizeof(Element)));
  uint4* body = reinterpret_cast<uint4*>(row + layout.num_head);
  write_scalars(row, teacher_row, layout, job, num_true);
  if (job.is_zero) {
    zero_vectors(body, layout.num_vectors);
  } else {
    write_vectors(body, teacher_row + layout.num_head, layout, job, num_true);
  }
}

}  // namespace bapo
