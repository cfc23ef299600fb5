#include "cpu/logprob.h"

#include <algorithm>
#include <cstring>

#include "common/logprob.h"
#include "cpu/float_types.h"
#include "cpu/row_kernels.h"

namespace bapo {
namespace {

const RowKernels& row_kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return kAvx512RowKernels;
  if (isa == Isa::kAvx2) return kAvx2RowKernels;
#endif
  static_cast<void>(isa);
  return kPortableRowKernels;
}

size_t element_bytes(LogitType type) { return type == LogitType::kFloat32 ? 4 : 2; }

char* row_address(const Logits& logits, int64_t row) {
  const int64_t offset = row * logits.row_stride * static_cast<int64_t>(element_bytes(logits.type));
  return static_cast<char*>(logits.data) + offset;
}

template <typename T>
T load_element(const char* row, int64_t column) {
  T element;
  std::memcpy(&element, row + column * sizeof(T), sizeof(T));
  return element;
}

float read_logit(const char* row, int64_t column, LogitType type) {
  switch (type) {
    case LogitType::kFloat32:
      return load_element<float>(row, column);
    case LogitType::kBFloat16:
      return to_float(load_element<BFloat16>(row, column));
    case LogitType::kFloat16:
      break;
  }
  return to_float(load_element<Half>(row, column));
}

template <typename T>
void store_element(char* row, int64_t column, float value) {
  const T element = from_float<T>(value);
  std::memcpy(row + column * sizeof(T), &element, sizeof(T));
}

void write_logit(char* row, int64_t column, LogitType type, float value) {
  switch (type) {
    case LogitType::kFloat32:
      return store_element<float>(row, column, value);
    case LogitType::kBFloat16:
      return store_element<BFloat16>(row, column, value);
    case LogitType::kFloat16:
      return store_element<Half>(row, column, value);
  }
}

// This rank's column of a vocabulary id, -1 where it is another rank's.
int64_t local_column(const Logits& logits, int64_t id) {
  const int64_t column = id - logits.vocab_start;
  return 0 <= column && column < num_true_columns(logits) ? column : -1;
}

float value_or_zero(const float* values, int64_t index) {
  return values == nullptr ? 0.0f : values[index];
}

bool has_nan(const RowGradient& gradient) {
  return is_nan(gradient.shift) || is_nan(gradient.norm) || is_nan(gradient.slope) ||
         is_nan(gradient.offset);
}

// The true columns of one row. Its target is read before the row is overwritten.
void overwrite_row(const Logits& logits, char* row, int64_t target_column,
                   const RowGradient& gradient, RowGradientFunction row_gradient_in_place) {
  const int64_t num_columns = num_true_columns(logits);
  if (has_nan(gradient)) {
    // Not by vectors: rounding to 16 bits could carry out of a NaN that comes with a full payload.
    for (int64_t j = 0; j < num_columns; ++j) write_logit(row, j, logits.type, kNaN);
    return;
  }
  const bool is_here = target_column >= 0;
  const float target = is_here ? read_logit(row, target_column, logits.type) : 0.0f;
  row_gradient_in_place(row, num_columns, gradient);
  if (is_here) {
    const float value = logit_gradient(target, gradient) + gradient.at_target;
    write_logit(row, target_column, logits.type, value);
  }
}

}  // namespace

void logprob_partials(const LogprobPartialsParams& params, Isa isa, int64_t begin, int64_t end) {
  const Logits& logits = params.logits;
  const RowSumsFunction row_sums = row_kernels(isa).sums[static_cast<int>(logits.type)];
  const int64_t num_columns = num_true_columns(logits);
  const float scale = exponent_scale(logits.temperature);
  for (int64_t token = begin; token < end; ++token) {
    const char* row = row_address(logits, params.rows == nullptr ? token : params.rows[token]);
    const int64_t column = local_column(logits, params.target[token]);
    const float target = column >= 0 ? read_logit(row, column, logits.type) : 0.0f;
    const Partials partials = finish_partials(row_sums(row, num_columns, scale), target, scale);
    std::memcpy(params.partials + 4 * token, &partials, sizeof(partials));
  }
}

void logprob_combine(const LogprobCombineParams& params, int64_t begin, int64_t end) {
  const int64_t rank_stride = 4 * params.num_tokens;
  for (int64_t token = begin; token < end; ++token) {
    const TokenLogprob result = combine_partials(params.partials + 4 * token, params.num_ranks,
                                                 rank_stride, params.temperature);
    params.logprob[token] = result.logprob;
    params.entropy[token] = result.entropy;
    params.max[token] = result.max;
    params.log_sum[token] = result.log_sum;
  }
}

bool assign_tokens_to_rows(const LogitsBackwardParams& params) {
  std::fill_n(params.token_of_row, params.logits.num_rows, -1);
  for (int64_t token = 0; token < params.num_tokens; ++token) {
    int32_t& slot = params.token_of_row[params.rows == nullptr ? token : params.rows[token]];
    if (slot != -1) return false;
    slot = static_cast<int32_t>(token);
  }
  return true;
}

void logits_backward(const LogitsBackwardParams& params, Isa isa, int64_t begin, int64_t end) {
  const Logits& logits = params.logits;
  const RowGradientFunction row_gradient_in_place =
      row_kernels(isa).gradient[static_cast<int>(logits.type)];
  const int64_t num_columns = num_true_columns(logits);
  const size_t bytes = element_bytes(logits.type);
  for (int64_t index = begin; index < end; ++index) {
    char* row = row_address(logits, index);
    const int32_t token = params.token_of_row[index];
    const float grad_logprob = token < 0 ? 0.0f : value_or_zero(params.grad_logprob, token);
    const float grad_entropy = token < 0 ? 0.0f : value_or_zero(params.grad_entropy, token);
    if (grad_logprob == 0.0f && grad_entropy == 0.0f) {
      std::memset(row, 0, logits.num_columns * bytes);
      continue;
    }
    const RowGradient gradient =
        row_gradient(params.max[token], params.log_sum[token], params.entropy[token], grad_logprob,
                     grad_entropy, logits.temperature);
    overwrite_row(logits, row, local_column(logits, params.target[token]), gradient,
                  row_gradient_in_place);
    std::memset(row + num_columns * bytes, 0, (logits.num_columns - num_columns) * bytes);
  }
}

}  // namespace bapo
