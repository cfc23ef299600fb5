// exp in double precision with the same bits on every machine.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace bapo {

// a * b + c with one rounding. A hardware instruction where there is one (x86 with FMA3, ARM, GPU),
// else the C library's exact software version: slower, same bits.
BAPO_HD double fused_multiply_add(double a, double b, double c) {
#if defined(__CUDA_ARCH__)
  return __fma_rn(a, b, c);
#else
  return __builtin_fma(a, b, c);
#endif
}

BAPO_HD double bits_to_double(uint64_t bits) {
#if defined(__CUDA_ARCH__)
  return __longlong_as_double(static_cast<long long>(bits));
#else
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

BAPO_HD uint64_t double_to_bits(double value) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint64_t>(__double_as_longlong(value));
#else
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

// The widest argument of det_exp.
constexpr double kDetExpLimit = 700.0;

// e^x for |x| <= kDetExpLimit, within 1 ulp.
//
// x = n ln 2 + f with |f| <= ln 2 / 2, then a polynomial of degree 13 by Horner's rule and an exact
// scaling by 2^n. Only additions, fused multiply-adds and bit moves in a fixed order: the result is
// a function of x alone, on any CPU or GPU. Build with -ffp-contract=off and without -ffast-math.
BAPO_HD double det_exp(double x) {
  constexpr double kLog2E = 1.4426950408889634074;
  constexpr double kLn2High = 6.93147180369123816490e-01;  // 33 bits: n * kLn2High is exact
  constexpr double kLn2Low = 1.90821492927058770002e-10;
  constexpr double kRoundToInteger = 6755399441055744.0;  // 1.5 * 2^52
  // The sum's low bits hold n + bias in two's complement; subtracting the constant leaves n.
  constexpr int64_t kExponentBias = 1023;

  const double shifted = fused_multiply_add(x, kLog2E, kRoundToInteger);
  const double n = shifted - kRoundToInteger;
  double f = fused_multiply_add(-n, kLn2High, x);
  f = fused_multiply_add(-n, kLn2Low, f);

  double p = 1.0 / 6227020800.0;
  p = fused_multiply_add(p, f, 1.0 / 479001600.0);
  p = fused_multiply_add(p, f, 1.0 / 39916800.0);
  p = fused_multiply_add(p, f, 1.0 / 3628800.0);
  p = fused_multiply_add(p, f, 1.0 / 362880.0);
  p = fused_multiply_add(p, f, 1.0 / 40320.0);
  p = fused_multiply_add(p, f, 1.0 / 5040.0);
  p = fused_multiply_add(p, f, 1.0 / 720.0);
  p = fused_multiply_add(p, f, 1.0 / 120.0);
  p = fused_multiply_add(p, f, 1.0 / 24.0);
  p = fused_multiply_add(p, f, 1.0 / 6.0);
  p = fused_multiply_add(p, f, 0.5);
  p = fused_multiply_add(p, f, 1.0);
  p = fused_multiply_add(p, f, 1.0);

  const uint64_t exponent = double_to_bits(shifted) + static_cast<uint64_t>(kExponentBias);
  return p * bits_to_double(exponent << 52);
}

}  // namespace bapo
