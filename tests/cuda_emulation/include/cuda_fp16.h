// Stands for CUDA's header of this name: the part that csrc/cuda uses, on the host.
#pragma once

#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};

inline float __half2float(__half half) {
  const uint32_t sign = static_cast<uint32_t>(half.bits & 0x8000u) << 16;
  const int exponent = (half.bits >> 10) & 31;
  const int mantissa = half.bits & 1023;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | (mantissa == 0 ? 0u : 0x400000u));
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -24)
                              : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  return sign == 0 ? magnitude : -magnitude;
}

// To nearest, ties to even; every NaN becomes 0x7fff, as on the device.
inline __half __float2half_rn(float value) {
  if (value != value) return {0x7fff};
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00)};
  // A unit of the last place: 2^-24 below 2^-14, else 2^-10 of the leading bit.
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const int unit = exponent - 11 < -24 ? -24 : exponent - 11;
  const float rounded = std::ldexp(std::nearbyint(std::ldexp(magnitude, -unit)), unit);
  if (rounded == 0.0f) return {sign};
  std::frexp(rounded, &exponent);
  if (exponent - 11 < -24)
    return {static_cast<uint16_t>(sign | static_cast<uint16_t>(std::ldexp(rounded, 24)))};
  const int mantissa = static_cast<int>(std::ldexp(rounded, 11 - exponent)) - 1024;
  return {static_cast<uint16_t>(sign | ((exponent + 14) << 10) | mantissa)};
}

inline float2 __half22float2(__half2 pair) { return {__half2float(pair.x), __half2float(pair.y)}; }
inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}

inline __half2 __hmax2(__half2 a, __half2 b) {
  return __floats2half2_rn(std::fmax(__half2float(a.x), __half2float(b.x)),
                           std::fmax(__half2float(a.y), __half2float(b.y)));
}
