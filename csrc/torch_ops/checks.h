// What every op checks before it touches memory. Each failure names the argument, the rule and the
// value, and reaches Python as RuntimeError.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

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
Logits check_logits(const Tensor& logits, int64_t vocab_start, int64_t vocab_size,
                    double temperature);

// target [T] and rows [T] (absent: T is the number of rows), as they go with the logits. Returns T.
int64_t check_tokens(const Tensor& logits, const OptionalTensor& rows, const Tensor& target);

// Every row and every target within its range. Reads them: for tensors on the CPU.
void check_indices(const Logits& logits, const int64_t* rows, const int64_t* target,
                   int64_t num_tokens);

void check_temperature(double temperature);

// The target of the search in units of 2^-24.
uint64_t check_target(double target, Measure measure);

// The grid that ClipGrid.to_bytes() put into a uint8 tensor on the CPU.
ClipGrid check_grid(const Tensor& grid);

void check_table(const Tensor& table, const ClipGrid& grid);

// One of the named choices.
template <typename T>
T check_choice(const char* name, const std::string& value,
               std::initializer_list<std::pair<const char*, T>> choices) {
  std::string allowed;
  for (const auto& [text, choice] : choices) {
    if (value == text) return choice;
    allowed += (allowed.empty() ? "" : " or ") + std::string(text);
  }
  STD_TORCH_CHECK(false, name, " must be ", allowed, ", got '", value, "'");
  return choices.begin()->second;
}

}  // namespace bapo
