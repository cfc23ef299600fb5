// A row of logits in pieces that fit the registers of a block, and one thread's sums over them.
#pragma once

#include "cuda/device.cuh"
#include "cuda/logits.cuh"

namespace bapo {

constexpr int kSumThreads = 256;
constexpr int kSumWarps = kSumThreads / kWarpSize;
// 16-byte vectors that a thread keeps in registers: 256 * 10 of them hold 20,480 16-bit columns.
constexpr int kVectorsPerPiece = 10;
constexpr int kPieceSize = kSumThreads * kVectorsPerPiece;

// One thread's sums in two halves, relative to 2^shift; two chains of additions are in flight.
struct ThreadSums {
  float sum[2];
  float weighted[2];

  __device__ __forceinline__ explicit ThreadSums(const ShiftedSums& sums)
      : sum{sums.sum, 0.0f}, weighted{sums.weighted, 0.0f} {}

  // Returns 2^e2.
  __device__ __forceinline__ float add(float e2, int half) {
    const float power = exp2_approx(e2);
    sum[half] += power;
    weighted[half] = fused_multiply_add(power, e2, weighted[half]);
    return power;
  }

  __device__ __forceinline__ ShiftedSums total(float max) const {
    return {max, sum[0] + sum[1], weighted[0] + weighted[1]};
  }
};

// With nothing but -inf so far any shift gives zeros; -inf itself would give NaN.
__device__ __forceinline__ float shift_of(float max, float scale) {
  return max == -kInfinity ? 0.0f : max * scale;
}

// A thread's vectors of one piece of a row.
struct Piece {
  uint4 vectors[kVectorsPerPiece];
  int num_left;

  __device__ __forceinline__ bool has(int i) const { return i * kSumThreads < num_left; }

  template <typename Element>
  __device__ __forceinline__ float max() const {
    RunningMax<Element> max;
#pragma unroll
    for (int i = 0; i < kVectorsPerPiece; ++i) {
      if (has(i)) max.add(vectors[i]);
    }
    return max.result();
  }
};

// body: first vector of the row.
template <bool kIsAligned = false, typename Element>
__device__ __forceinline__ Piece load_piece(const Element* body, const ThreadVectors& mine) {
  const bool is_aligned = kIsAligned || is_at_boundary(body);
  Piece piece;
  piece.num_left = mine.num_left;
#pragma unroll
  for (int i = 0; i < kVectorsPerPiece; ++i) {
    if (piece.has(i)) {
      const int vector = mine.first + i * kSumThreads;
      piece.vectors[i] = load_vector(body + vector * kVectorLength<Element>, is_aligned);
    }
  }
  return piece;
}

}  // namespace bapo
