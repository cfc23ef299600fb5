#include "torch_ops/checks.h"

#include <torch/headeronly/core/ScalarType.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/bound_search.h"
#include "cpu/choices.h"

namespace bapo {
namespace {

std::string device_text(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  const std::string type = tensor.is_cuda() ? "cuda" : "another device";
  return type + ":" + std::to_string(tensor.get_device_index());
}

// As Python writes it.
const char* type_text(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    default:
      return torch::headeronly::toString(type);
  }
}

}  // namespace

std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    text += (dim == 0 ? "" : ", ") + std::to_string(tensor.size(dim));
  }
  return text + "]";
}

void check_type(const char* name, const Tensor& tensor, ScalarType type) {
  STD_TORCH_CHECK(tensor.scalar_type() == type, name, " must be ", type_text(type), ", got ",
                  type_text(tensor.scalar_type()));
}

void check_same_device(const char* name, const Tensor& tensor, const char* other_name,
                       const Tensor& other) {
  STD_TORCH_CHECK(device_text(tensor) == device_text(other), name, " must be on the device of ",
                  other_name, ", ", device_text(other), ", got ", device_text(tensor));
}

int64_t check_num_tokens(const char* name, const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.dim() == 1, name, " must have shape [T], got ", shape_text(tensor));
  return tensor.size(0);
}

void check_vector(const char* name, const Tensor& tensor, ScalarType type, int64_t size,
                  const char* like_name, const Tensor& like) {
  check_type(name, tensor, type);
  check_same_device(name, tensor, like_name, like);
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) == size, name, " must have shape [", size,
                  "], got ", shape_text(tensor));
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous, got stride ",
                  tensor.stride(0));
}

void check_temperature(double temperature) {
  STD_TORCH_CHECK(std::isfinite(temperature) && static_cast<float>(temperature) > 0,
                  "temperature must be > 0 and finite, got ", temperature);
}

Logits check_logits(const char* name, const Tensor& logits, int64_t vocab_start, int64_t vocab_size,
                    double temperature) {
  const ScalarType type = logits.scalar_type();
  STD_TORCH_CHECK(
      type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half, name,
      " must be float32, bfloat16 or float16, got ", type_text(type));
  STD_TORCH_CHECK(logits.dim() == 2, name, " must have shape [N, V], got ", shape_text(logits));
  const int64_t num_columns = logits.size(1);
  STD_TORCH_CHECK(num_columns <= 1 || logits.stride(1) == 1, "the columns of ", name,
                  " must be adjacent in memory, got stride ", logits.stride(1),
                  "; call contiguous()");
  STD_TORCH_CHECK(logits.size(0) <= 1 || logits.stride(0) >= num_columns, "the rows of ", name,
                  " must not overlap, got stride ", logits.stride(0), " for rows of ", num_columns);
  STD_TORCH_CHECK(logits.size(0) <= std::numeric_limits<int32_t>::max(), name,
                  " must have fewer than 2^31 rows, got ", logits.size(0));
  STD_TORCH_CHECK(vocab_start >= 0, "vocab_start must be >= 0, got ", vocab_start);
  STD_TORCH_CHECK(vocab_size >= 1, "vocab_size must be >= 1, got ", vocab_size);
  check_temperature(temperature);
  const LogitType kind = type == ScalarType::Float      ? LogitType::kFloat32
                         : type == ScalarType::BFloat16 ? LogitType::kBFloat16
                                                        : LogitType::kFloat16;
  return {const_cast<void*>(logits.const_data_ptr()),
          kind,
          logits.size(0),
          num_columns,
          logits.stride(0),
          vocab_start,
          vocab_size,
          static_cast<float>(temperature)};
}

LogitsPair check_logits_pair(const Tensor& student, const Tensor& teacher, int64_t vocab_start,
                             int64_t vocab_size, double temperature) {
  const Logits checked = check_logits("student", student, vocab_start, vocab_size, temperature);
  check_type("teacher", teacher, student.scalar_type());
  check_same_device("teacher", teacher, "student", student);
  STD_TORCH_CHECK(shape_text(teacher) == shape_text(student),
                  "teacher must have the shape of student, ", shape_text(student), ", got ",
                  shape_text(teacher));
  return {checked, check_logits("teacher", teacher, vocab_start, vocab_size, temperature)};
}

void check_partials(const Tensor& partials, int64_t numbers) {
  check_type("partials", partials, ScalarType::Float);
  STD_TORCH_CHECK(partials.dim() == 3 && partials.size(0) >= 1 && partials.size(2) == numbers,
                  "partials must have shape [P, T, ", numbers, "] with P >= 1, got ",
                  shape_text(partials));
  STD_TORCH_CHECK(partials.is_contiguous(), "partials must be contiguous");
}

KlDirection check_direction(const std::string& direction) {
  return with_check_error([&] {
    return parse_choice<KlDirection>(
        "direction", direction,
        {{"reverse", KlDirection::kReverse}, {"forward", KlDirection::kForward}});
  });
}

int64_t check_tokens(const Tensor& logits, const OptionalTensor& rows, const Tensor& target) {
  const int64_t num_tokens = check_num_tokens("target", target);
  check_vector("target", target, ScalarType::Long, num_tokens, "logits", logits);
  if (rows.has_value()) {
    check_vector("rows", *rows, ScalarType::Long, num_tokens, "logits", logits);
  } else {
    STD_TORCH_CHECK(num_tokens == logits.size(0), "target must have one token per row of logits, ",
                    logits.size(0), ", where no rows are given; got ", num_tokens);
  }
  return num_tokens;
}

void check_indices(const Logits& logits, const int64_t* rows, const int64_t* target,
                   int64_t num_tokens) {
  for (int64_t token = 0; token < num_tokens; ++token) {
    STD_TORCH_CHECK(0 <= target[token] && target[token] < logits.vocab_size,
                    "target must lie in [0, vocab_size) = [0, ", logits.vocab_size, "), got ",
                    target[token], " at token ", token);
    if (rows == nullptr) continue;
    STD_TORCH_CHECK(0 <= rows[token] && rows[token] < logits.num_rows,
                    "rows must lie in [0, N) = [0, ", logits.num_rows, "), got ", rows[token],
                    " at token ", token);
  }
}

SearchRule check_rule(double target, const std::string& contribution, const std::string& measure) {
  return with_check_error([&] { return make_rule(target, contribution, measure); });
}

ClipGrid check_grid(const Tensor& grid) {
  check_type("grid", grid, ScalarType::Byte);
  STD_TORCH_CHECK(grid.is_cpu(), "grid must be on the cpu, got ", device_text(grid));
  constexpr int64_t kBytes = sizeof(ClipGrid);
  STD_TORCH_CHECK(grid.dim() == 1 && grid.size(0) == kBytes && grid.is_contiguous(),
                  "grid must be the ", kBytes, " bytes of ClipGrid.to_bytes(), got shape ",
                  shape_text(grid));
  ClipGrid result;
  std::memcpy(&result, data<uint8_t>(grid), sizeof(result));
  with_check_error([&] { check_clip_grid(result); });
  return result;
}

void check_table(const Tensor& table, const ClipGrid& grid) {
  check_vector("table", table, ScalarType::Long, num_slots(grid), "table", table);
}

}  // namespace bapo
