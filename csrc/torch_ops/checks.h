// What every op checks before it touches memory. Each failure names the argument, the rule and the
// value, and reaches Python as RuntimeError.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "common/clip_grid.h"
#include "common/params.h"

namespace bapo {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// "[4, 19008]"
std::string shape_text(const Tensor& tensor);

void check_type(const char* name, const Tensor& tensor, ScalarType type);
void check_same_device(const char* name, const Tensor& tensor, const char* other_name,
                       const Tensor& other);

// T of a tensor [T].
int64_t check_num_tokens(const char* name, const Tensor& tensor);

// A contiguous tensor of one dimension, on the device of `like`, with this many elements.
void check_vector(const char* name, const Tensor& tensor, ScalarType type, int64_t size,
                  const char* like_name, const Tensor& like);

// Pointer to a checked vector's elements, or null where the tensor is absent.
template <typename T>
const T* optional_data(const OptionalTensor& tensor) {
  return tensor.has_value() ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr;
}

template <typename T>
const T* data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <typename T>
T* mutable_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// [N, V] logits of a supported type with adjacent columns, and their numbers.
Logits check_logits(const char* name, const Tensor& logits, int64_t vocab_start, int64_t vocab_size,
                    double temperature);

// The logits of a student and of its teacher, alike but for the stride of their rows.
struct LogitsPair {
  Logits student;
  Logits teacher;
};
LogitsPair check_logits_pair(const Tensor& student, const Tensor& teacher, int64_t vocab_start,
                             int64_t vocab_size, double temperature);

// target [T] and rows [T] (absent: T is the number of rows), as they go with the logits. Returns T.
int64_t check_tokens(const Tensor& logits, const OptionalTensor& rows, const Tensor& target);

// Every row and every target within its range. Reads them: for tensors on the CPU.
void check_indices(const Logits& logits, const int64_t* rows, const int64_t* target,
                   int64_t num_tokens);

void check_temperature(double temperature);

// The partials [P, T, numbers] of all ranks.
void check_partials(const Tensor& partials, int64_t numbers);

KlDirection check_direction(const std::string& direction);

// The rule of the search from its names.
SearchRule check_rule(double target, const std::string& contribution, const std::string& measure);

// The grid that ClipGrid.to_bytes() put into a uint8 tensor on the CPU.
ClipGrid check_grid(const Tensor& grid);

void check_table(const Tensor& table, const ClipGrid& grid);

// The checks that the Python classes share throw std::invalid_argument.
template <typename Function>
auto with_check_error(const Function& function) {
  try {
    return function();
  } catch (const std::invalid_argument& error) {
    STD_TORCH_CHECK(false, error.what());
    throw;
  }
}

}  // namespace bapo
