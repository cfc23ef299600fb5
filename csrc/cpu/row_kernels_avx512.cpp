// The logit kernels for AVX-512 (F, BW, DQ, VL).
#if defined(__x86_64__)

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/float_types.h"
#include "cpu/row_kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
// GCC's own headers: an operand that they leave undefined on purpose (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#endif

namespace bapo {
namespace {

struct Simd {
  using Float = __m512;
  static constexpr int kWidth = 16;

  BAPO_HD static Float broadcast(float x) { return _mm512_set1_ps(x); }
  BAPO_HD static Float load(const float* p) { return _mm512_loadu_ps(p); }
  BAPO_HD static Float load(const BFloat16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  BAPO_HD static Float load(const Half* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  template <typename Element>
  BAPO_HD static void load_pair(const Element* p, Float* pair) {
    pair[0] = load(p);
    pair[1] = load(p + kWidth);
  }
  // Even elements, then odd ones: two instructions instead of four.
  BAPO_HD static void load_pair(const BFloat16* p, Float* pair) {
    const __m512i both = _mm512_loadu_si512(p);
    pair[0] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    pair[1] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(kHighHalf)));
  }
  BAPO_HD static void store_pair(float* p, const Float* pair) {
    _mm512_storeu_ps(p, pair[0]);
    _mm512_storeu_ps(p + kWidth, pair[1]);
  }
  BAPO_HD static void store_pair(BFloat16* p, const Float* pair) {
    const __m512i even = _mm512_srli_epi32(round_to_high_half(pair[0]), 16);
    const __m512i odd = round_to_high_half(pair[1]);
    const __m512i both = _mm512_mask_blend_epi16(0xaaaaaaaa, even, odd);
    _mm512_storeu_si512(p, both);
  }
  BAPO_HD static void store_pair(Half* p, const Float* pair) {
    for (int i = 0; i < 2; ++i) {
      const __m256i half = _mm512_cvtps_ph(pair[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + i * kWidth), half);
    }
  }
  BAPO_HD static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  BAPO_HD static Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
  BAPO_HD static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  BAPO_HD static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  BAPO_HD static Float max(Float a, Float b) { return _mm512_max_ps(a, b); }
  BAPO_HD static Float fraction(Float x) {
    return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  }
  BAPO_HD static Float times_power(Float p, Float x) { return _mm512_scalef_ps(p, x); }
  struct Exponent {
    Float scale;
    Float shift;
    BAPO_HD Exponent(float scale, float shift) : scale(broadcast(scale)), shift(broadcast(shift)) {}
    BAPO_HD Float operator()(Float x) const { return _mm512_fmsub_ps(x, scale, shift); }
  };
  BAPO_HD static Float where_minus_infinity(Float x, Float a, Float b) {
    const __mmask16 is = _mm512_cmp_ps_mask(x, broadcast(-kInfinity), _CMP_EQ_OQ);
    return _mm512_mask_mov_ps(b, is, a);
  }
  BAPO_HD static float reduce_add(Float x) { return _mm512_reduce_add_ps(x); }
  BAPO_HD static float reduce_max(Float x) { return _mm512_reduce_max_ps(x); }
  BAPO_HD static bool has_nan(Float x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }

 private:
  static constexpr int kHighHalf = static_cast<int>(0xffff0000u);

  // Adds half a unit of the high half, and less by one bit where that half is even: ties go to
  // even. A NaN with a low half of zeros has no carry and stays NaN.
  BAPO_HD static __m512i round_to_high_half(Float x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __mmask16 is_odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(1 << 16));
    const __m512i up = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
    return _mm512_mask_add_epi32(up, is_odd, up, _mm512_set1_epi32(1));
  }
};

#include "cpu/row_loops.inc.h"

}  // namespace

const RowKernels kAvx512RowKernels = kRowKernels;

}  // namespace bapo

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__
