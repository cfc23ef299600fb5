// The logit kernels in the compiler's own vectors of four, for any processor.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/float_types.h"
#include "cpu/row_kernels.h"

namespace bapo {
namespace {

struct Simd {
  static constexpr int kWidth = 4;
  typedef float Float __attribute__((vector_size(16)));
  typedef int32_t Int __attribute__((vector_size(16)));

  BAPO_HD static Float broadcast(float x) { return Float{x, x, x, x}; }
  BAPO_HD static Float load(const float* p) {
    Float x;
    std::memcpy(&x, p, sizeof(x));
    return x;
  }
  BAPO_HD static Float load(const BFloat16* p) { return (Float)(load_bits(p) << 16); }
  // As to_float does.
  BAPO_HD static Float load(const Half* p) {
    const Int bits = load_bits(p);
    const Int magnitude = bits & 0x7fff;
    const Int scaled = (Int)((Float)(magnitude << 13) * 5.192296858534828e33f);
    const Int special = (magnitude >= 0x7c00) & 0x7f800000;
    return (Float)(scaled | special | ((bits & 0x8000) << 16));
  }
  template <typename Element>
  BAPO_HD static void load_pair(const Element* p, Float* pair) {
    pair[0] = load(p);
    pair[1] = load(p + kWidth);
  }
  template <typename Element>
  BAPO_HD static void store_pair(Element* p, const Float* pair) {
    for (int i = 0; i < 2 * kWidth; ++i) p[i] = from_float<Element>(pair[i / kWidth][i % kWidth]);
  }
  BAPO_HD static Float add(Float a, Float b) { return a + b; }
  BAPO_HD static Float sub(Float a, Float b) { return a - b; }
  BAPO_HD static Float mul(Float a, Float b) { return a * b; }
  BAPO_HD static Float fma(Float a, Float b, Float c) { return a * b + c; }
  BAPO_HD static Float max(Float a, Float b) { return a > b ? a : b; }
  BAPO_HD static Float fraction(Float x) { return x - floor(x); }
  // Adds to the exponent's bits, which is right for normal results: those below 2^-126 become 0.
  BAPO_HD static Float times_power(Float p, Float x) {
    const Int exponent = ((Int)(floor(x) + kRoundToInteger) - (Int)broadcast(kRoundToInteger))
                         << 23;
    const Float scaled = (Float)((Int)p + exponent);
    const Float finite = x < broadcast(-126.0f) ? broadcast(0.0f) : scaled;
    return p == p ? finite : p;
  }
  // Without a fused multiply-add: with a reference r near shift / scale,
  // x scale - shift = (x - r) scale + (r scale - shift), where no term is large but for small
  // powers.
  struct Exponent {
    float scale;
    float reference;
    float residual;
    BAPO_HD Exponent(float scale, float shift)
        : scale(scale),
          reference(shift / scale),
          residual(static_cast<float>(static_cast<double>(reference) * static_cast<double>(scale) -
                                      static_cast<double>(shift))) {}
    BAPO_HD Float operator()(Float x) const { return (x - reference) * scale + residual; }
  };
  BAPO_HD static Float where_minus_infinity(Float x, Float a, Float b) {
    return x == -kInfinity ? a : b;
  }
  BAPO_HD static float reduce_add(Float x) { return (x[0] + x[2]) + (x[1] + x[3]); }
  BAPO_HD static float reduce_max(Float x) {
    const float even = x[0] > x[2] ? x[0] : x[2];
    const float odd = x[1] > x[3] ? x[1] : x[3];
    return even > odd ? even : odd;
  }
  BAPO_HD static bool has_nan(Float x) {
    return x[0] != x[0] || x[1] != x[1] || x[2] != x[2] || x[3] != x[3];
  }

 private:
  typedef uint16_t Bits __attribute__((vector_size(8)));

  BAPO_HD static Int load_bits(const void* p) {
    Bits bits;
    std::memcpy(&bits, p, sizeof(bits));
    return __builtin_convertvector(bits, Int);
  }

  static constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23: its low bits are integers
  // For |x| < 2^22.
  BAPO_HD static Float floor(Float x) {
    const Float nearest = (x + kRoundToInteger) - kRoundToInteger;
    return nearest > x ? nearest - 1.0f : nearest;
  }
};

#include "cpu/row_loops.inc.h"

}  // namespace

const RowKernels kPortableRowKernels = kRowKernels;

}  // namespace bapo
