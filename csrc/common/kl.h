// KL divergence of a token over its whole vocabulary, from parts of a student's and a teacher's
// row, and the gradient of one logit of the student.
//
// The divergence is a mean over its first distribution: KL(first || second), where the first is the
// student's in the reverse direction and the teacher's in the forward one. With d of
// common/logprob.h for the first row, d' for the second,
//   KL = sum e^d (d - d') / S - log S + log S'.
// The differences are summed as such: sum e^d d and sum e^d d' taken apart cancel for similar rows,
// and would leave an error of 1e-6 and more of a divergence near 0. Of equal rows it is exactly 0.
//
// Where the second row holds -inf, its d' is kMinExponent ln 2 = -104 from the row's maximum over
// all ranks: the divergence stays finite. The weight of those columns is summed too, because their
// d' does not move with the reference when parts are merged.
#pragma once

#include "common/logprob.h"

namespace bapo {

enum class KlDirection : int {
  kReverse,  // KL(student || teacher)
  kForward,  // KL(teacher || student)
};

// One rank's part of one token: eight adjacent floats of the array [T, 8].
struct KlPartials {
  Partials student;
  float teacher_max;
  float teacher_sum;
  float cross;    // sum e^d (d - d')
  float floored;  // sum e^d where the second row holds -inf
};

// Of the first row, relative to the references of both; in base 2 within a row of logits.
template <typename Number>
struct CrossSums {
  Number sum;      // sum e^d
  Number cross;    // sum e^d (d - d')
  Number floored;  // sum e^d where d' has its floor
};

// The same sums after d has become d + step, and d' has become d' + second_step; factor = e^step.
// Equal steps leave a cross sum of 0 at 0.
template <typename Number>
BAPO_HD CrossSums<Number> move_references(const CrossSums<Number>& sums, Number step,
                                          Number second_step, Number factor) {
  const Number moved = (step - second_step) * sums.sum + second_step * sums.floored;
  return {factor * sums.sum, factor * (sums.cross + moved), factor * sums.floored};
}

// How far exponents of 2 move from an old maximum to a new one.
BAPO_HD float reference_step(float old_max, float new_max, float scale) {
  return old_max == -kInfinity ? 0.0f : old_max * scale - new_max * scale;
}

// Steps in powers of 2.
BAPO_HD CrossSums<float> move_references(const CrossSums<float>& sums, float step,
                                         float second_step) {
  const float clamped = clamp_exponent(step);
  return move_references(sums, clamped, second_step, exp2_approx(clamped));
}

// What two rows of logits are summed to, each relative to its own maximum.
struct KlSums {
  ShiftedSums first;
  ShiftedSums second;
  CrossSums<float> cross;
};

// What a maximum's float32 shift leaves out, as in finish_partials.
BAPO_HD float shift_residual(float max, float scale) {
  return max == -kInfinity ? 0.0f : fused_multiply_add(max, scale, -(max * scale));
}

BAPO_HD KlPartials finish_kl_partials(const KlSums& sums, float target, float scale,
                                      KlDirection direction) {
  const CrossSums<float> cross = move_references(sums.cross, -shift_residual(sums.first.max, scale),
                                                 -shift_residual(sums.second.max, scale));
  const bool is_reverse = direction == KlDirection::kReverse;
  const Partials teacher = finish_partials(is_reverse ? sums.second : sums.first, 0.0f, scale);
  return {finish_partials(is_reverse ? sums.first : sums.second, target, scale), teacher.max,
          teacher.sum, kLn2 * cross.cross, cross.floored};
}

// Adjacent floats.
struct TokenKl {
  TokenLogprob student;
  float teacher_max;      // M'
  float teacher_log_sum;  // log S'
  float kl;
};
constexpr int kNumKlResults = sizeof(TokenKl) / sizeof(float);

// Merges the ranks' parts in rank order, in float64. A rank whose first row is all -inf or padding
// is skipped. NaN anywhere makes all seven NaN. rank_stride as in combine_partials.
BAPO_HD TokenKl combine_kl_partials(const float* partials, int64_t num_ranks, int64_t rank_stride,
                                    float temperature, KlDirection direction) {
  // The halves begin alike; of the teacher's only maximum and sum are used.
  const MergedPartials student = merge_partials(partials, num_ranks, rank_stride, temperature);
  const MergedPartials teacher = merge_partials(partials + 4, num_ranks, rank_stride, temperature);
  const int first_half = direction == KlDirection::kReverse ? 0 : 4;
  const MergedPartials& first = first_half == 0 ? student : teacher;
  const MergedPartials& second = first_half == 0 ? teacher : student;
  CrossSums<double> total = {0.0, 0.0, 0.0};
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    const float* part = partials + rank * rank_stride;
    const float max = part[first_half];
    const float second_max = part[4 - first_half];
    if (max == -kInfinity) continue;
    const double step = scaled_step(max, first.max, temperature);
    const double second_step =
        second_max == -kInfinity ? 0.0 : scaled_difference(second_max, second.max, temperature);
    const CrossSums<double> moved = move_references<double>(
        {part[first_half + 1], part[6], part[7]}, step, second_step, det_exp(step));
    total.sum += moved.sum;
    total.cross += moved.cross;
  }
  const double kl = total.cross / total.sum - log(first.sum) + log(second.sum);
  const TokenKl result = {token_logprob(student, temperature), teacher.max,
                          static_cast<float>(log(teacher.sum)), static_cast<float>(kl)};
  const bool has_nan = is_nan(result.student.logprob) || is_nan(result.student.entropy) ||
                       is_nan(result.teacher_max) || is_nan(result.kl);
  return has_nan ? TokenKl{{kNaN, kNaN, kNaN, kNaN}, kNaN, kNaN, kNaN} : result;
}

// The gradient of a row, prepared once. With p and q the probabilities of student and teacher,
//   d KL(student || teacher) / d x_j = p_j (log p_j - log q_j - KL) / temperature,
//   d KL(teacher || student) / d x_j = (p_j - q_j) / temperature, 0 where x_j is -inf.
struct KlGradient {
  RowGradient row;      // of log-prob and entropy; reverse: its offset has the part of KL too
  float teacher_shift;  // as in RowGradient
  float teacher_norm;
  float slope;  // factor of log2 p - log2 q (reverse) or of p - q (forward)
};

BAPO_HD KlGradient kl_gradient(const TokenKl& token, float grad_logprob, float grad_entropy,
                               float grad_kl, float temperature, KlDirection direction) {
  RowGradient row = row_gradient(token.student.max, token.student.log_sum, token.student.entropy,
                                 grad_logprob, grad_entropy, temperature);
  const RowGradient teacher =
      row_gradient(token.teacher_max, token.teacher_log_sum, 0.0f, 0.0f, 0.0f, temperature);
  float slope = grad_kl / temperature;
  if (direction == KlDirection::kReverse) {
    row.offset -= slope * token.kl;
    slope *= kLn2;
  }
  return {row, teacher.shift, teacher.norm, slope};
}

// Without the target's own term.
template <KlDirection kDirection>
BAPO_HD float kl_logit_gradient(float logit, float teacher_logit, const KlGradient& gradient) {
  const RowGradient& row = gradient.row;
  const float student = fused_multiply_add(logit, row.scale, -row.shift);
  const float teacher = fused_multiply_add(teacher_logit, row.scale, -gradient.teacher_shift);
  const float e2 = clamp_exponent(student - row.norm);
  const float p = exp2_approx(e2);
  const float factor = fused_multiply_add(row.slope, e2, row.offset);
  if constexpr (kDirection == KlDirection::kReverse) {
    const float q2 = (teacher == -kInfinity ? kMinExponent : teacher) - gradient.teacher_norm;
    return p * fused_multiply_add(gradient.slope, e2 - q2, factor);
  } else {
    const float q = exp2_approx(clamp_exponent(teacher - gradient.teacher_norm));
    const float value = fused_multiply_add(gradient.slope, p - q, p * factor);
    return student == -kInfinity ? 0.0f : value;
  }
}

}  // namespace bapo
