// Probes for tests of the emulator and of the shared index arithmetic; no kernel of the library.
#include "common/row_layout.h"
#include "cuda/device.cuh"

namespace {

// Thread 0 waits for the block while its warp waits for it.
__global__ void deadlock_kernel(int* out) {
  if (threadIdx.x == 0) __syncthreads();
  out[threadIdx.x] = static_cast<int>(bapo::warp_max(1.0f));
}

__global__ void exited_lane_kernel(int* out) {
  if (threadIdx.x == 5) return;
  out[threadIdx.x] = static_cast<int>(bapo::warp_max(1.0f));
}

__global__ void misaligned_kernel(int* out) {
  const uint4 vector = __ldcs(reinterpret_cast<const uint4*>(out + 1));
  out[0] = static_cast<int>(vector.x);
}

// Reads a neighbour's value without a barrier after the write.
__global__ void race_kernel(int* out) {
  __shared__ int values[64];
  values[threadIdx.x] = 0;
  __syncthreads();
  values[threadIdx.x] = static_cast<int>(threadIdx.x) + 1;
  out[threadIdx.x] = values[(threadIdx.x + 1) % 64];
}

}  // namespace

extern "C" {

int probe_launch(int which, int* out) {
  void (*const kernels[])(int*) = {deadlock_kernel, exited_lane_kernel, misaligned_kernel,
                                   race_kernel};
  return bapo::launch(kernels[which], 1, 64, nullptr, out);
}

// counts[c]: how often the threads of one block read column c of a row at this address.
void probe_row_layout(uint64_t address, int num_columns, int element_bytes, int num_threads,
                      int piece_size, int* counts) {
  const bapo::RowLayout layout = bapo::row_layout(address, num_columns, element_bytes);
  const int num_pieces = bapo::num_pieces(layout.num_vectors, piece_size);
  for (int thread = 0; thread < num_threads; ++thread) {
    if (thread < bapo::num_scalars(layout)) ++counts[bapo::scalar_column(layout, thread)];
    for (int piece = 0; piece < num_pieces; ++piece) {
      const bapo::ThreadVectors mine =
          bapo::thread_vectors(layout.num_vectors, piece_size, piece, thread);
      for (int i = 0; i * num_threads < mine.num_left; ++i) {
        const int column = bapo::vector_column(layout, mine.first + i * num_threads);
        for (int j = 0; j < layout.vector_length; ++j) ++counts[column + j];
      }
    }
  }
}

// Largest i + 1 over all threads and pieces: vectors that a thread holds at once.
int probe_max_vectors(uint64_t address, int num_columns, int element_bytes, int num_threads,
                      int piece_size) {
  const bapo::RowLayout layout = bapo::row_layout(address, num_columns, element_bytes);
  const int num_pieces = bapo::num_pieces(layout.num_vectors, piece_size);
  int most = 0;
  for (int piece = 0; piece < num_pieces; ++piece) {
    const bapo::ThreadVectors mine = bapo::thread_vectors(layout.num_vectors, piece_size, piece, 0);
    const int held = (mine.num_left + num_threads - 1) / num_threads;
    most = held > most ? held : most;
  }
  return most;
}

// Whether every vector of the row starts at a multiple of 16 bytes.
int probe_vectors_aligned(uint64_t address, int num_columns, int element_bytes) {
  const bapo::RowLayout layout = bapo::row_layout(address, num_columns, element_bytes);
  const uint64_t first = address + static_cast<uint64_t>(layout.num_head * element_bytes);
  return layout.num_vectors == 0 || first % bapo::kVectorBytes == 0;
}

}  // extern "C"
