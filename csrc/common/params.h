// Arguments of the CPU and the CUDA version of each op: plain pointers and numbers, checked by
// torch_ops/. Shapes: N rows of logits, V local columns, T tokens, P tensor-parallel ranks.
// Arrays are contiguous except the rows of the logits.
#pragma once

#include <cstdint>

#include "common/clip_grid.h"
#include "common/contribution.h"
#include "common/kl.h"
#include "common/search.h"

namespace bapo {

enum class LogitType { kFloat32, kBFloat16, kFloat16 };

// [N, V] logits of this rank. Row i starts at element i * row_stride, its columns are adjacent.
struct Logits {
  void* data;
  LogitType type;
  int64_t num_rows;
  int64_t num_columns;
  int64_t row_stride;
  int64_t vocab_start;  // vocabulary id of column 0
  int64_t vocab_size;   // true size: columns of ids from here on are padding
  float temperature;
};

// Columns of this rank that are not padding.
BAPO_HD int64_t num_true_columns(const Logits& logits) {
  const int64_t left = logits.vocab_size - logits.vocab_start;
  if (left <= 0) return 0;
  return left < logits.num_columns ? left : logits.num_columns;
}

BAPO_HD float value_or_zero(const float* values, int64_t index) {
  return values == nullptr ? 0.0f : values[index];
}

struct LogprobPartialsParams {
  Logits logits;          // read only
  const int64_t* rows;    // [T] row of each token, or null: row t
  const int64_t* target;  // [T] vocabulary ids
  int64_t num_tokens;
  float* partials;  // [T, 4] out: Partials
};

struct LogprobCombineParams {
  const float* partials;  // [P, T, 4]
  int64_t num_ranks;
  int64_t num_tokens;
  float temperature;
  float* logprob;  // [T] out, like the next three
  float* entropy;
  float* max;
  float* log_sum;
};

struct LogitsBackwardParams {
  Logits logits;          // overwritten with its gradient
  const int64_t* rows;    // [T], each row at most once, or null: row t
  const int64_t* target;  // [T]
  int64_t num_tokens;
  const float* max;           // [T], from logprob_combine, like the next two
  const float* log_sum;       // [T]
  const float* entropy;       // [T]
  const float* grad_logprob;  // [T] or null: 0
  const float* grad_entropy;  // [T] or null: 0
  int32_t* token_of_row;      // [N] scratch: token of each row, -1 none, -2 several
};

struct KlPartialsParams {
  Logits student;  // [T, V] read only, like the teacher's of the same type and shape
  Logits teacher;
  const int64_t* target;  // [T] vocabulary ids
  int64_t num_tokens;
  KlDirection direction;
  float* partials;  // [T, 8] out: KlPartials
};

struct KlCombineParams {
  const float* partials;  // [P, T, 8]
  int64_t num_ranks;
  int64_t num_tokens;
  float temperature;
  KlDirection direction;
  float* results[kNumKlResults];  // [T] each, out: the numbers of TokenKl
};

BAPO_HD void write_token_kl(const KlCombineParams& params, int64_t token) {
  const TokenKl result =
      combine_kl_partials(params.partials + 8 * token, params.num_ranks, 8 * params.num_tokens,
                          params.temperature, params.direction);
  float values[kNumKlResults];
  memcpy(values, &result, sizeof(result));
  for (int i = 0; i < kNumKlResults; ++i) params.results[i][token] = values[i];
}

struct KlBackwardParams {
  Logits student;         // [T, V] overwritten with its gradient
  Logits teacher;         // [T, V] read only
  const int64_t* target;  // [T]
  int64_t num_tokens;
  const float* max;  // [T], from kl_combine, like the next five
  const float* log_sum;
  const float* entropy;
  const float* teacher_max;
  const float* teacher_log_sum;
  const float* kl;
  const float* grad_logprob;  // [T] or null: 0
  const float* grad_entropy;  // [T] or null: 0
  const float* grad_kl;       // [T]
  KlDirection direction;
};

// Whether the token's row becomes zeros, whatever its logits hold.
BAPO_HD bool has_no_gradient(const KlBackwardParams& params, int64_t token) {
  return value_or_zero(params.grad_logprob, token) == 0.0f &&
         value_or_zero(params.grad_entropy, token) == 0.0f && params.grad_kl[token] == 0.0f;
}

BAPO_HD KlGradient token_gradient(const KlBackwardParams& params, int64_t token) {
  const TokenKl values = {{0.0f, params.entropy[token], params.max[token], params.log_sum[token]},
                          params.teacher_max[token],
                          params.teacher_log_sum[token],
                          params.kl[token]};
  return kl_gradient(values, value_or_zero(params.grad_logprob, token),
                     value_or_zero(params.grad_entropy, token), params.grad_kl[token],
                     params.student.temperature, params.direction);
}

struct ContributionsParams {
  const float* logprob;  // [T], like the next three
  const float* behaviour_logprob;
  const float* advantage;
  const float* mask;
  int64_t num_tokens;
  ClipGrid grid;
  WeightKind weight;
  int64_t* table;  // [num_slots(grid)], added to
};

// What search_bounds writes, as float64.
enum BoundsField : int {
  kBoundsLow,
  kBoundsHigh,
  kBoundsShareStart,
  kBoundsShare,
  kBoundsExit,        // Exit
  kBoundsNonFinite,   // tokens that were not finite
  kBoundsOutOfRange,  // tokens with |w A| >= 2^8 or a mask that is neither 0 nor 1
  kBoundsTokens,      // tokens with A != 0
  kNumBoundsFields
};

struct SearchBoundsParams {
  const int64_t* table;  // [num_slots(grid)], summed over all ranks
  ClipGrid grid;
  SearchRule rule;
  double* bounds;  // [kNumBoundsFields] out
};

struct ImportanceRatioParams {
  const float* logprob;            // [T]
  const float* behaviour_logprob;  // [T]
  int64_t num_tokens;
  float* ratio;  // [T] out
};

}  // namespace bapo
