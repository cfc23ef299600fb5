#include "emulator.h"

#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace emulator {
namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr unsigned kWarpSize = 32;
constexpr unsigned kMaxThreads = 1024;

// Fibers arrive; when all that are expected have, the generation moves on and they may run again.
struct Barrier {
  uint64_t generation = 0;
  unsigned num_arrived = 0;
};

struct Warp {
  Barrier barrier;
  // Two turns: a lane can bring the next value while another has not yet read this one.
  unsigned char values[2][kWarpSize][8];
  unsigned num_exited = 0;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  const Barrier* waits_for = nullptr;
  uint64_t generation = 0;  // of waits_for when the fiber arrived
  bool has_exited = false;
};

struct Block {
  Barrier barrier;
  unsigned num_threads = 0;
  unsigned num_exited = 0;
  bool predicate[2] = {false, false};
  std::vector<Warp> warps;
};

std::vector<Fiber> fibers(kMaxThreads);
ucontext_t scheduler;
Block block;
const std::function<void()>* running_kernel = nullptr;
std::string failure;
uint64_t order_setting = 0;

void fail(const std::string& message) {
  if (failure.empty()) {
    failure = "block " + std::to_string(blockIdx.x) + ", thread " + std::to_string(threadIdx.x) +
              ": " + message;
  }
}

// Threads that have exited do not hold up the others at a block barrier.
void release_block() {
  Barrier& barrier = block.barrier;
  if (barrier.num_arrived > 0 && barrier.num_arrived == block.num_threads - block.num_exited) {
    ++barrier.generation;
    barrier.num_arrived = 0;
    block.predicate[barrier.generation % 2] = false;
  }
}

void wait(const Barrier& barrier, uint64_t generation) {
  Fiber& fiber = fibers[threadIdx.x];
  fiber.waits_for = &barrier;
  fiber.generation = generation;
  if (barrier.generation == generation) swapcontext(&fiber.context, &scheduler);
  fiber.waits_for = nullptr;
}

void fiber_main() {
  (*running_kernel)();
  Fiber& fiber = fibers[threadIdx.x];
  fiber.has_exited = true;
  ++block.num_exited;
  ++block.warps[threadIdx.x / kWarpSize].num_exited;
  release_block();
  swapcontext(&fiber.context, &scheduler);
}

void start_block(unsigned num_threads) {
  block = Block{};
  block.num_threads = num_threads;
  block.warps.resize((num_threads + kWarpSize - 1) / kWarpSize);
  for (unsigned thread = 0; thread < num_threads; ++thread) {
    Fiber& fiber = fibers[thread];
    if (!fiber.stack) fiber.stack = std::make_unique<char[]>(kStackBytes);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
    fiber.waits_for = nullptr;
    fiber.has_exited = false;
  }
}

// Warps in the order of the setting, and so the lanes of each.
std::vector<unsigned> ordered(unsigned count) {
  std::vector<unsigned> order(count);
  for (unsigned i = 0; i < count; ++i) order[i] = i;
  if (order_setting == 1) std::reverse(order.begin(), order.end());
  if (order_setting > 1) {
    std::mt19937_64 generator(order_setting + blockIdx.x);
    std::shuffle(order.begin(), order.end(), generator);
  }
  return order;
}

// Runs a thread until it waits or exits. False where it has nothing to do.
bool resume(unsigned thread) {
  Fiber& fiber = fibers[thread];
  if (fiber.has_exited) return false;
  if (fiber.waits_for != nullptr && fiber.waits_for->generation == fiber.generation) return false;
  threadIdx = dim3(thread, 0, 0);
  swapcontext(&scheduler, &fiber.context);
  return failure.empty();
}

// A warp goes on for as long as it can before the next one runs: the schedule in which a barrier
// that is missing does the most harm.
bool run_warp(unsigned warp, const std::vector<unsigned>& lanes, unsigned num_threads) {
  bool any_ran = false;
  for (bool goes_on = true; goes_on;) {
    goes_on = false;
    for (const unsigned lane : lanes) {
      const unsigned thread = warp * kWarpSize + lane;
      if (thread < num_threads && resume(thread)) goes_on = true;
    }
    any_ran = any_ran || goes_on;
  }
  return any_ran;
}

void run_block(unsigned num_threads) {
  start_block(num_threads);
  const std::vector<unsigned> warps = ordered(static_cast<unsigned>(block.warps.size()));
  const std::vector<unsigned> lanes = ordered(kWarpSize);
  while (block.num_exited < num_threads && failure.empty()) {
    bool any_ran = false;
    for (const unsigned warp : warps) {
      if (run_warp(warp, lanes, num_threads)) any_ran = true;
    }
    if (!any_ran) fail("a barrier or shuffle that other threads never reach");
  }
}

}  // namespace

bool run_grid(const dim3& grid, const dim3& block_size, const std::function<void()>& kernel) {
  failure.clear();
  if (grid.x == 0 || grid.y != 1 || grid.z != 1 || block_size.x == 0 ||
      block_size.x > kMaxThreads || block_size.y != 1 || block_size.z != 1) {
    failure = "a grid that this emulator or the hardware does not run";
    return false;
  }
  gridDim = grid;
  blockDim = block_size;
  running_kernel = &kernel;
  for (unsigned index = 0; index < grid.x && failure.empty(); ++index) {
    blockIdx = dim3(index, 0, 0);
    run_block(block_size.x);
  }
  return failure.empty();
}

void require_aligned(const void* address, uintptr_t alignment) {
  if (reinterpret_cast<uintptr_t>(address) % alignment == 0) return;
  fail("misaligned vector access");
  swapcontext(&fibers[threadIdx.x].context, &scheduler);
}

void block_barrier() {
  const uint64_t generation = block.barrier.generation;
  ++block.barrier.num_arrived;
  release_block();
  wait(block.barrier, generation);
}

bool block_barrier_or(bool predicate) {
  const uint64_t turn = block.barrier.generation % 2;
  block.predicate[turn] = block.predicate[turn] || predicate;
  block_barrier();
  return block.predicate[turn];
}

void shuffle_xor(unsigned mask, void* value, int num_bytes, int lane_mask) {
  Warp& warp = block.warps[threadIdx.x / kWarpSize];
  const unsigned lane = threadIdx.x % kWarpSize;
  if (mask != 0xffffffffu || warp.num_exited > 0 || block.num_threads % kWarpSize != 0) {
    fail("a shuffle without all 32 lanes");
    swapcontext(&fibers[threadIdx.x].context, &scheduler);
  }
  const uint64_t generation = warp.barrier.generation;
  unsigned char (&values)[kWarpSize][8] = warp.values[generation % 2];
  std::memcpy(values[lane], value, static_cast<size_t>(num_bytes));
  if (++warp.barrier.num_arrived == kWarpSize) {
    ++warp.barrier.generation;
    warp.barrier.num_arrived = 0;
  }
  wait(warp.barrier, generation);
  std::memcpy(value, values[lane ^ static_cast<unsigned>(lane_mask)],
              static_cast<size_t>(num_bytes));
}

}  // namespace emulator

extern "C" void emulator_set_order(uint64_t order) { emulator::order_setting = order; }

extern "C" const char* emulator_last_failure() { return emulator::failure.c_str(); }
