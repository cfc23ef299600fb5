// Logits of the three element types in vectors of 16 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "common/logprob.h"
#include "common/params.h"
#include "common/row_layout.h"

namespace bapo {

// More columns are refused: within a row indices are int.
constexpr int64_t kMaxColumns = INT_MAX - kVectorBytes;

// Two 16-bit elements as the bits of a 32-bit word.
template <typename Pair_>
struct PairWord {
  using Pair = Pair_;

  static __device__ __forceinline__ uint32_t as_word(Pair pair) {
    uint32_t word;
    memcpy(&word, &pair, sizeof(word));
    return word;
  }
  static __device__ __forceinline__ Pair as_pair(uint32_t word) {
    Pair pair;
    memcpy(&pair, &word, sizeof(word));
    return pair;
  }
};

// How a 32-bit word holds elements.
template <typename Element>
struct Word;

template <>
struct Word<float> {
  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    values[0] = __uint_as_float(word);
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    return __float_as_uint(values[0]);
  }
  static __device__ __forceinline__ float load(const float* address) { return *address; }
  static __device__ __forceinline__ float round(float value) { return value; }
};

template <>
struct Word<__nv_bfloat16> : PairWord<__nv_bfloat162> {
  static constexpr uint32_t kMinusInfinities = 0xff80ff80u;

  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    values[0] = __uint_as_float(word << 16);
    values[1] = __uint_as_float(word & 0xffff0000u);
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    return as_word(__floats2bfloat162_rn(values[0], values[1]));
  }
  static __device__ __forceinline__ float load(const __nv_bfloat16* address) {
    return __bfloat162float(*address);
  }
  static __device__ __forceinline__ __nv_bfloat16 round(float value) {
    return __float2bfloat16_rn(value);
  }
};

template <>
struct Word<__half> : PairWord<__half2> {
  static constexpr uint32_t kMinusInfinities = 0xfc00fc00u;

  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    const float2 pair = __half22float2(as_pair(word));
    values[0] = pair.x;
    values[1] = pair.y;
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    return as_word(__floats2half2_rn(values[0], values[1]));
  }
  static __device__ __forceinline__ float load(const __half* address) {
    return __half2float(*address);
  }
  static __device__ __forceinline__ __half round(float value) { return __float2half_rn(value); }
};

template <typename Element>
constexpr int kVectorLength = vector_length(sizeof(Element));

template <typename Element>
__device__ __forceinline__ bool is_at_boundary(const Element* address) {
  return reinterpret_cast<uint64_t>(address) % kVectorBytes == 0;
}

// 16 bytes from anywhere; a row beside another one may have its own alignment.
template <typename Element>
__device__ __forceinline__ uint4 load_vector(const Element* address, bool is_aligned) {
  if (is_aligned) return __ldcs(reinterpret_cast<const uint4*>(address));
  Element elements[kVectorLength<Element>];
#pragma unroll
  for (int j = 0; j < kVectorLength<Element>; ++j) elements[j] = address[j];
  uint4 vector;
  memcpy(&vector, elements, sizeof(vector));
  return vector;
}

template <typename Element>
__device__ __forceinline__ void unpack_vector(const uint4& vector, float* values) {
  constexpr int kPerWord = kVectorLength<Element> / 4;
  Word<Element>::unpack(vector.x, values);
  Word<Element>::unpack(vector.y, values + kPerWord);
  Word<Element>::unpack(vector.z, values + 2 * kPerWord);
  Word<Element>::unpack(vector.w, values + 3 * kPerWord);
}

template <typename Element>
__device__ __forceinline__ uint4 pack_vector(const float* values) {
  constexpr int kPerWord = kVectorLength<Element> / 4;
  return make_uint4(Word<Element>::pack(values), Word<Element>::pack(values + kPerWord),
                    Word<Element>::pack(values + 2 * kPerWord),
                    Word<Element>::pack(values + 3 * kPerWord));
}

// Largest element so far. 16-bit types compare in pairs, which takes a quarter of the instructions
// that unpacking first would take. Ignores NaN, which reaches the sums.
template <typename Element>
class RunningMax {
 public:
  __device__ __forceinline__ void add(const uint4& vector) {
    const auto low = __hmax2(Word<Element>::as_pair(vector.x), Word<Element>::as_pair(vector.y));
    const auto high = __hmax2(Word<Element>::as_pair(vector.z), Word<Element>::as_pair(vector.w));
    max_ = __hmax2(max_, __hmax2(low, high));
  }

  __device__ __forceinline__ float result() const {
    float values[2];
    Word<Element>::unpack(Word<Element>::as_word(max_), values);
    return fmaxf(values[0], values[1]);
  }

 private:
  typename Word<Element>::Pair max_ = Word<Element>::as_pair(Word<Element>::kMinusInfinities);
};

template <>
class RunningMax<float> {
 public:
  __device__ __forceinline__ void add(const uint4& vector) {
    max_ = fmaxf(fmaxf(max_, fmaxf(__uint_as_float(vector.x), __uint_as_float(vector.y))),
                 fmaxf(__uint_as_float(vector.z), __uint_as_float(vector.w)));
  }

  __device__ __forceinline__ float result() const { return max_; }

 private:
  float max_ = -kInfinity;
};

// Calls function(Element{}) for the element type of the logits.
template <typename Function>
cudaError_t dispatch_element(LogitType type, const Function& function) {
  switch (type) {
    case LogitType::kFloat32:
      return function(float{});
    case LogitType::kBFloat16:
      return function(__nv_bfloat16{});
    case LogitType::kFloat16:
      return function(__half{});
  }
  return cudaErrorInvalidValue;
}

// This rank's column of a target, else -1.
__device__ __forceinline__ int local_column(const Logits& logits, int64_t target) {
  const int64_t column = target - logits.vocab_start;
  return column >= 0 && column < num_true_columns(logits) ? static_cast<int>(column) : -1;
}

}  // namespace bapo
