// The logit kernels for AVX2 with FMA and F16C.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/float_types.h"
#include "cpu/row_kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace bapo {
namespace {

struct Simd {
  using Float = __m256;
  static constexpr int kWidth = 8;

  BAPO_HD static Float broadcast(float x) { return _mm256_set1_ps(x); }
  BAPO_HD static Float load(const float* p) { return _mm256_loadu_ps(p); }
  BAPO_HD static Float load(const BFloat16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  BAPO_HD static Float load(const Half* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  template <typename Element>
  BAPO_HD static void load_pair(const Element* p, Float* pair) {
    pair[0] = load(p);
    pair[1] = load(p + kWidth);
  }
  // Even elements, then odd ones: two instructions instead of four.
  BAPO_HD static void load_pair(const BFloat16* p, Float* pair) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    pair[0] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    pair[1] = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(kHighHalf)));
  }
  BAPO_HD static void store_pair(float* p, const Float* pair) {
    _mm256_storeu_ps(p, pair[0]);
    _mm256_storeu_ps(p + kWidth, pair[1]);
  }
  BAPO_HD static void store_pair(BFloat16* p, const Float* pair) {
    const __m256i even = _mm256_srli_epi32(round_to_high_half(pair[0]), 16);
    const __m256i odd = round_to_high_half(pair[1]);
    const __m256i both = _mm256_blend_epi16(even, odd, 0xaa);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), both);
  }
  BAPO_HD static void store_pair(Half* p, const Float* pair) {
    for (int i = 0; i < 2; ++i) {
      const __m128i half = _mm256_cvtps_ph(pair[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p + i * kWidth), half);
    }
  }
  BAPO_HD static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  BAPO_HD static Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
  BAPO_HD static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  BAPO_HD static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  BAPO_HD static Float max(Float a, Float b) { return _mm256_max_ps(a, b); }
  BAPO_HD static Float fraction(Float x) { return _mm256_sub_ps(x, _mm256_floor_ps(x)); }
  // Adds to the exponent's bits, which is right for normal results: those below 2^-126 become 0.
  BAPO_HD static Float times_power(Float p, Float x) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvttps_epi32(_mm256_floor_ps(x)), 23);
    const __m256 scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
    const __m256 vanishes = _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_LT_OQ);
    return _mm256_andnot_ps(vanishes, scaled);
  }
  struct Exponent {
    Float scale;
    Float shift;
    BAPO_HD Exponent(float scale, float shift) : scale(broadcast(scale)), shift(broadcast(shift)) {}
    BAPO_HD Float operator()(Float x) const { return _mm256_fmsub_ps(x, scale, shift); }
  };
  BAPO_HD static Float where_minus_infinity(Float x, Float a, Float b) {
    return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, broadcast(-kInfinity), _CMP_EQ_OQ));
  }
  BAPO_HD static float reduce_add(Float x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  BAPO_HD static float reduce_max(Float x) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }
  BAPO_HD static bool has_nan(Float x) {
    return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0;
  }

 private:
  static constexpr int kHighHalf = static_cast<int>(0xffff0000u);

  // Adds half a unit of the high half, and less by one bit where that half is even: ties go to
  // even. A NaN with a low half of zeros has no carry and stays NaN.
  BAPO_HD static __m256i round_to_high_half(Float x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  }
};

#include "cpu/row_loops.inc.h"

}  // namespace

const RowKernels kAvx2RowKernels = kRowKernels;

}  // namespace bapo

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__
