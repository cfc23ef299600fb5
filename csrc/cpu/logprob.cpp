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

bool has_nan(const RowGradient& gradient) {
  return is_nan(gradient.shift) || is_nan(gradient.norm) || is_nan(gradient.slope) ||
         is_nan(gradient.offset);
}

bool has_nan(const KlGradient& gradient) {
  return has_nan(gradient.row) || is_nan(gradient.teacher_shift) || is_nan(gradient.teacher_norm) ||
         is_nan(gradient.slope);
}

// The true columns of one row by overwrite(), then padding. target: gradient at the target,
// computed before.
template <typename Gradient, typename Overwrite>
void overwrite_row(const Logits& logits, char* row, const Gradient& gradient, int64_t target_column,
                   float target, const Overwrite& overwrite) {
  const int64_t num_columns = num_true_columns(logits);
  const size_t bytes = element_bytes(logits.type);
  if (has_nan(gradient)) {
    // Not by vectors: rounding to 16 bits could carry out of a NaN that comes with a full payload.
    for (int64_t j = 0; j < num_columns; ++j) write_logit(row, j, logits.type, kNaN);
  } else {
    overwrite(row, num_columns);
    if (target_column >= 0) write_logit(row, target_column, logits.type, target);
  }
  std::memset(row + num_columns * bytes, 0, (logits.num_columns - num_columns) * bytes);
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
    const int64_t column = local_column(logits, params.target[token]);
    float target = 0.0f;
    if (column >= 0) {
      target = logit_gradient(read_logit(row, column, logits.type), gradient) + gradient.at_target;
    }
    overwrite_row(logits, row, gradient, column, target, [&](char* columns, int64_t count) {
      row_gradient_in_place(columns, count, gradient);
    });
  }
}

void kl_partials(const KlPartialsParams& params, Isa isa, int64_t begin, int64_t end) {
  const Logits& student = params.student;
  const KlSumsFunction sums = row_kernels(isa).kl_sums[static_cast<int>(student.type)];
  const int64_t num_columns = num_true_columns(student);
  const float scale = exponent_scale(student.temperature);
  for (int64_t token = begin; token < end; ++token) {
    const char* row = row_address(student, token);
    const char* teacher_row = row_address(params.teacher, token);
    const int64_t column = local_column(student, params.target[token]);
    const float target = column >= 0 ? read_logit(row, column, student.type) : 0.0f;
    const bool is_reverse = params.direction == KlDirection::kReverse;
    const KlSums row_sums = is_reverse ? sums(row, teacher_row, num_columns, scale)
                                       : sums(teacher_row, row, num_columns, scale);
    const KlPartials partials = finish_kl_partials(row_sums, target, scale, params.direction);
    std::memcpy(params.partials + 8 * token, &partials, sizeof(partials));
  }
}

void kl_combine(const KlCombineParams& params, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) write_token_kl(params, token);
}

void kl_backward(const KlBackwardParams& params, Isa isa, int64_t begin, int64_t end) {
  const Logits& student = params.student;
  const KlGradientFunction row_gradient_in_place =
      row_kernels(isa)
          .kl_gradient[static_cast<int>(params.direction)][static_cast<int>(student.type)];
  for (int64_t token = begin; token < end; ++token) {
    char* row = row_address(student, token);
    const char* teacher_row = row_address(params.teacher, token);
    if (has_no_gradient(params, token)) {
      std::memset(row, 0, student.num_columns * element_bytes(student.type));
      continue;
    }
    const KlGradient gradient = token_gradient(params, token);
    const int64_t column = local_column(student, params.target[token]);
    float target = 0.0f;
    if (column >= 0) {
      const float logit = read_logit(row, column, student.type);
      const float teacher_logit = read_logit(teacher_row, column, student.type);
      target = gradient.row.at_target +
               (params.direction == KlDirection::kReverse
                    ? kl_logit_gradient<KlDirection::kReverse>(logit, teacher_logit, gradient)
                    : kl_logit_gradient<KlDirection::kForward>(logit, teacher_logit, gradient));
    }
    overwrite_row(student, row, gradient, column, target, [&](char* columns, int64_t count) {
      row_gradient_in_place(columns, teacher_row, count, gradient);
    });
  }
}

}  // namespace bapo
