// 16-bit floating-point numbers as bits, with conversions that need no instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace bapo {

struct BFloat16 {
  uint16_t bits;
};

struct Half {
  uint16_t bits;
};

BAPO_HD float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

BAPO_HD uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

BAPO_HD float to_float(float value) { return value; }

BAPO_HD float to_float(BFloat16 value) {
  return float_from_bits(static_cast<uint32_t>(value.bits) << 16);
}

// The exponent is moved by a product with 2^112, which makes subnormal numbers right too.
BAPO_HD float to_float(Half value) {
  const uint32_t magnitude = value.bits & 0x7fffu;
  const float scaled = float_from_bits(magnitude << 13) * 5.192296858534828e33f;
  const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;  // infinity or NaN
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  return float_from_bits(bits_of_float(scaled) | special | sign);
}

// Rounds to nearest even; NaN stays NaN.
template <typename T>
T from_float(float value);

template <>
BAPO_HD float from_float<float>(float value) {
  return value;
}

template <>
BAPO_HD BFloat16 from_float<BFloat16>(float value) {
  const uint32_t bits = bits_of_float(value);
  if (value != value) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
BAPO_HD Half from_float<Half>(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t rounded;
  if (magnitude > 0x7f800000u) {
    rounded = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // 65520: rounds to infinity
    rounded = 0x7c00u;
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14. The sum with 0.5 has one unit of a subnormal half as its last place, so the
    // addition rounds, and its low bits are the result.
    rounded = bits_of_float(float_from_bits(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    rounded = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  }
  return {static_cast<uint16_t>(rounded | sign)};
}

}  // namespace bapo
