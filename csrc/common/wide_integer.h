// 128-bit sums and exact comparison of their products.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace bapo {

using uint128 = unsigned __int128;

// high * 2^32 + low with low < 2^32: up to 160 bits.
struct WideProduct {
  uint128 high;
  uint64_t low;
};

// value * factor, exact for value < 2^116 and factor <= 2^32: the low part is below 2^64, the high
// part below 2^84 * 2^32 + 2^32 < 2^117.
BAPO_HD WideProduct wide_multiply(uint128 value, uint64_t factor) {
  constexpr uint64_t kLow32 = 0xffffffffULL;
  const uint64_t low = (static_cast<uint64_t>(value) & kLow32) * factor;
  const uint128 high = (value >> 32) * factor + (low >> 32);
  return {high, low & kLow32};
}

BAPO_HD bool at_least(const WideProduct& left, const WideProduct& right) {
  return left.high != right.high ? left.high > right.high : left.low >= right.low;
}

}  // namespace bapo
