// Which columns of a row of logits a GPU thread touches: plain arithmetic, so that tests without a
// GPU run it.
//
// A row of adjacent elements is a head of single elements up to the first 16-byte boundary, a body
// of 16-byte vectors, and a tail of single elements. Head and tail together are the row's scalars,
// numbered through; there are at most 2 * (vector_length - 1) of them, fewer than threads in a
// block.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace bapo {

constexpr int kVectorBytes = 16;

BAPO_HD constexpr int vector_length(int element_bytes) { return kVectorBytes / element_bytes; }

struct RowLayout {
  int num_head;
  int num_vectors;
  int num_tail;
  int vector_length;  // elements in one vector
};

// address: of the row's first element, which is aligned to its own size.
BAPO_HD RowLayout row_layout(uint64_t address, int num_columns, int element_bytes) {
  const int length = vector_length(element_bytes);
  const int past_boundary = static_cast<int>(address % kVectorBytes);
  const int to_boundary = past_boundary == 0 ? 0 : (kVectorBytes - past_boundary) / element_bytes;
  const int num_head = to_boundary < num_columns ? to_boundary : num_columns;
  const int num_vectors = (num_columns - num_head) / length;
  return {num_head, num_vectors, num_columns - num_head - num_vectors * length, length};
}

BAPO_HD int num_scalars(const RowLayout& layout) { return layout.num_head + layout.num_tail; }

// Column of a scalar, 0 <= index < num_scalars.
BAPO_HD int scalar_column(const RowLayout& layout, int index) {
  return index < layout.num_head ? index : index + layout.num_vectors * layout.vector_length;
}

// First column of a vector, 0 <= index < num_vectors.
BAPO_HD int vector_column(const RowLayout& layout, int index) {
  return layout.num_head + index * layout.vector_length;
}

// A row's vectors are taken in pieces of a fixed size, the last one perhaps smaller; at least one,
// perhaps empty, piece.
BAPO_HD int num_pieces(int num_vectors, int piece_size) {
  return num_vectors == 0 ? 1 : (num_vectors - 1) / piece_size + 1;
}

// Vectors first, first + stride, ... of a thread in a piece: the i-th of them exists where
// i * stride < num_left.
struct ThreadVectors {
  int first;
  int num_left;  // from the first one to the end of the piece; 0 or negative if there is none
};

BAPO_HD ThreadVectors thread_vectors(int num_vectors, int piece_size, int piece, int thread) {
  const int begin = piece * piece_size;
  const int left = num_vectors - begin;
  return {begin + thread, (left < piece_size ? left : piece_size) - thread};
}

}  // namespace bapo
