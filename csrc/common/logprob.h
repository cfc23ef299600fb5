// Log-prob and entropy of a token from parts of its row, and the gradient of one logit.
//
// With d_j = (x_j - max x) / temperature, a part of a row is reduced to
//   max = max x,   sum = sum e^d,   weighted = sum e^d d,   target = x_y (0 where it is elsewhere).
// Max and target stay raw logits, so they are exact and their difference is formed before it is
// scaled: at x = 80 and temperature 0.6 a scaled logit alone is off by 8e-6.
//
// Kernels sum in base 2: with k = log2(e) / temperature and shift = float32(max k), an element is
// e2 = fma(x, k, -shift), one rounding. All terms share the factor 2^residual with
// residual = max k - shift, which fma gives exactly; finish_partials takes it out again.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/det_exp.h"
#include "common/host_device.h"

#if !defined(__CUDA_ARCH__)
#include <cmath>
#endif

namespace bapo {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;
constexpr float kInfinity = __builtin_inff();
constexpr float kNaN = __builtin_nanf("");
// Below 2^-150 a term is 0 in float32; the clamp keeps 0 * -inf out of the weighted sum.
constexpr float kMinExponent = -150.0f;

BAPO_HD float fused_multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

BAPO_HD bool is_nan(float x) { return x != x; }

// k: multiplies a logit into an exponent of 2.
BAPO_HD float exponent_scale(float temperature) { return kLog2E / temperature; }

// 2^x for x in [kMinExponent, 128), within 2 ulp; NaN stays NaN.
BAPO_HD float exp2_approx(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return std::exp2(x);
#endif
}

// NaN goes through: it must reach the sums.
BAPO_HD float clamp_exponent(float e2) {
#if defined(__CUDA_ARCH__)
  float result;  // one instruction; the comparison below would be two
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(e2), "f"(kMinExponent));
  return result;
#else
  return e2 < kMinExponent ? kMinExponent : e2;
#endif
}

// One rank's part of one token: four adjacent floats of the array [T, 4].
struct Partials {
  float max;
  float sum;
  float weighted;
  float target;
};

// Sums in base 2, relative to 2^shift: sum 2^(x k - shift) and sum 2^(x k - shift) (x k - shift).
struct ShiftedSums {
  float max;  // raw; shift is float32(max k), -inf where there is nothing yet
  float sum;
  float weighted;
};

BAPO_HD ShiftedSums empty_sums() { return {-kInfinity, 0.0f, 0.0f}; }

// The same sums relative to another, not smaller, maximum.
BAPO_HD ShiftedSums rescale(const ShiftedSums& sums, float new_max, float scale) {
  if (sums.max == -kInfinity) return {new_max, sums.sum, sums.weighted};  // 0, or NaN that stays
  const float step = clamp_exponent(sums.max * scale - new_max * scale);
  const float factor = exp2_approx(step);
  return {new_max, factor * sums.sum, factor * fused_multiply_add(step, sums.sum, sums.weighted)};
}

// Partials from the sums over all true columns of this rank; a NaN or +inf logit shows as a NaN
// sum.
BAPO_HD Partials finish_partials(const ShiftedSums& sums, float target, float scale) {
  if (is_nan(sums.sum)) return {kNaN, kNaN, kNaN, target};
  if (sums.max == -kInfinity) return {-kInfinity, 0.0f, 0.0f, target};
  const float residual = fused_multiply_add(sums.max, scale, -(sums.max * scale));
  const float factor = exp2_approx(-residual);
  return {sums.max, factor * sums.sum,
          factor * kLn2 * fused_multiply_add(-residual, sums.sum, sums.weighted), target};
}

struct TokenLogprob {
  float logprob;
  float entropy;
  float max;      // M: largest raw logit
  float log_sum;  // log S, S = sum e^((x - M) / temperature)
};

// The ranks' partials of one row, merged; NaN in all four where one is NaN or no column is
// possible.
struct MergedPartials {
  float max;   // M
  double sum;  // S
  double weighted;
  double target;
};

// (value - reference) / temperature.
BAPO_HD double scaled_difference(float value, float reference, float temperature) {
  const double inverse_temperature = 1.0 / static_cast<double>(temperature);
  return (static_cast<double>(value) - static_cast<double>(reference)) * inverse_temperature;
}

// The same within the range of det_exp.
BAPO_HD double scaled_step(float value, float reference, float temperature) {
  const double step = scaled_difference(value, reference, temperature);
  return step < -kDetExpLimit ? -kDetExpLimit : step;
}

// Merges the ranks' partials in rank order, in float64:
//   S = sum a_i s_i,  U = sum a_i (t_i + d_i s_i),  a_i = e^d_i,  d_i = (m_i - M) / temperature.
// A rank whose columns are all -inf or padding has m_i = -inf and is skipped. rank_stride: floats
// from one rank's partials of the token to the next rank's.
BAPO_HD MergedPartials merge_partials(const float* partials, int64_t num_ranks, int64_t rank_stride,
                                      float temperature) {
  float max = -kInfinity;
  bool poisoned = false;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    const float* part = partials + rank * rank_stride;
    poisoned = poisoned || is_nan(part[0]) || is_nan(part[1]);
    max = part[0] > max ? part[0] : max;
  }
  if (poisoned || max == -kInfinity) return {kNaN, kNaN, kNaN, kNaN};
  MergedPartials merged = {max, 0.0, 0.0, 0.0};
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    const float* part = partials + rank * rank_stride;
    merged.target += static_cast<double>(part[3]);
    if (part[0] == -kInfinity) continue;
    const double d = scaled_step(part[0], max, temperature);
    const double alpha = det_exp(d);
    merged.sum += alpha * static_cast<double>(part[1]);
    merged.weighted += alpha * (static_cast<double>(part[2]) + d * static_cast<double>(part[1]));
  }
  return merged;
}

// logprob = (x_y - M) / temperature - log S,   entropy = log S - U / S.
BAPO_HD TokenLogprob token_logprob(const MergedPartials& merged, float temperature) {
  const double inverse_temperature = 1.0 / static_cast<double>(temperature);
  const double log_sum = log(merged.sum);
  const double logprob =
      (merged.target - static_cast<double>(merged.max)) * inverse_temperature - log_sum;
  return {static_cast<float>(logprob), static_cast<float>(log_sum - merged.weighted / merged.sum),
          merged.max, static_cast<float>(log_sum)};
}

// Both steps in one; NaN anywhere makes all four NaN.
BAPO_HD TokenLogprob combine_partials(const float* partials, int64_t num_ranks, int64_t rank_stride,
                                      float temperature) {
  return token_logprob(merge_partials(partials, num_ranks, rank_stride, temperature), temperature);
}

// The gradient of a row, prepared once: with e2 = log2 p,
//   d loss / d x = p (slope e2 + offset) + [j = y] at_target.
// It follows from d logprob / d x_j = ([j = y] - p_j) / temperature and
// d H / d x_j = -p_j (log p_j + H) / temperature.
struct RowGradient {
  float scale;  // k
  float shift;  // float32(M k)
  float norm;   // log2 S - residual: e2 = fma(x, k, -shift) - norm
  float slope;
  float offset;
  float at_target;
};

BAPO_HD RowGradient row_gradient(float max, float log_sum, float entropy, float grad_logprob,
                                 float grad_entropy, float temperature) {
  const float scale = exponent_scale(temperature);
  const float shift = max * scale;
  const float residual = fused_multiply_add(max, scale, -shift);
  const float inverse_temperature = 1.0f / temperature;
  return {scale,
          shift,
          fused_multiply_add(log_sum, kLog2E, residual),
          -inverse_temperature * grad_entropy * kLn2,
          -inverse_temperature * fused_multiply_add(grad_entropy, entropy, grad_logprob),
          inverse_temperature * grad_logprob};
}

// Without the target's own term.
BAPO_HD float logit_gradient(float logit, const RowGradient& row) {
  const float e2 = clamp_exponent(fused_multiply_add(logit, row.scale, -row.shift) - row.norm);
  return exp2_approx(e2) * fused_multiply_add(row.slope, e2, row.offset);
}

}  // namespace bapo
