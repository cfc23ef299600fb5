// Runs CUDA kernels on one host thread: one fiber per CUDA thread, one block after the other.
//
// Barriers and shuffles are the only places where a fiber gives way, so code between two of them
// runs in one go, and a warp runs for as long as it can before the next one does. The order of
// warps and lanes is a setting: a kernel with a race gives other results under another order.
// Deadlocks (a barrier or shuffle that some threads never reach), shuffles with exited lanes and
// misaligned vector accesses fail the launch.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

extern dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace emulator {

// Returns false and keeps a message if the grid failed.
bool run_grid(const dim3& grid, const dim3& block, const std::function<void()>& kernel);

// From within a kernel. An access that hardware would fault on ends the launch with a message.
void require_aligned(const void* address, uintptr_t alignment);
void block_barrier();
bool block_barrier_or(bool predicate);
// The bytes that the lane `lane ^ lane_mask` brought to this shuffle.
void shuffle_xor(unsigned mask, void* value, int num_bytes, int lane_mask);

}  // namespace emulator

extern "C" {
// How warps and lanes are ordered: 0 ascending, 1 descending, else shuffled by this seed.
void emulator_set_order(uint64_t order);
const char* emulator_last_failure();
}
