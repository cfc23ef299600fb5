// The row loops of the logit kernels, once for all instruction sets.
//
// row_sums:              sum 2^e and sum 2^e e, e = x k - shift, over row [V]; one read.
// row_gradient_in_place: x = p (slope e2 + offset) over row [V], p = 2^e2; one read, one write.
// V = columns.
//
// Included inside the anonymous namespace of a file that defines `Simd` and the target of the code;
// nothing here has a name outside that file, so the linker cannot mix versions. Simd has
//   Float, kWidth                        a vector and its number of lanes
//   broadcast(x), load(p)                p: float, BFloat16 or Half
//   load_pair(p, v), store_pair(p, v)    v[2]: 2 kWidth elements, in an order that the two share;
//                                        rounds to even; NaN stays NaN where its low half is 0
//   add, sub, mul, fma(a, b, c)          fma: a * b + c
//   Exponent(scale, shift)(x)            x scale - shift, as exact as with one rounding
//   max(a, b)                            b where either is NaN
//   fraction(x)                          x - floor(x)
//   times_power(p, x)                    p 2^floor(x) for p in [1, 2]; 0 where x < -150
//   reduce_add, reduce_max, has_nan      of one vector

constexpr int kUnroll = 4;  // even: independent sums, to cover the latency of fused operations
constexpr int64_t kChunk = kUnroll * Simd::kWidth;
constexpr int64_t kBlock = 1024;  // columns, a multiple of kChunk: stays in the first-level cache
constexpr int64_t kPrefetchBytes = 8192;  // ahead of the loads
// How far, in powers of 2, a term may exceed the reference of the sums. At 6 the weighted sum loses
// 2e-6 of the entropy to cancellation, at 2 less than 4e-7.
constexpr float kSlack = 2.0f;

using Float = Simd::Float;

// 2^x for x in [kMinExponent, 128). Minimax polynomials of 2^f on [0, 1) with 2^0 = 1; degree 5 is
// off by 1.4e-7 at most, degree 4 (for 16-bit results) by 3e-6.
template <int kDegree>
BAPO_HD Float exp2_vector(Float x) {
  const Float f = Simd::fraction(x);
  Float p;
  if constexpr (kDegree == 5) {
    p = Simd::broadcast(0x1.e96cf0p-10f);
    p = Simd::fma(p, f, Simd::broadcast(0x1.277b22p-7f));
    p = Simd::fma(p, f, Simd::broadcast(0x1.c91c38p-5f));
    p = Simd::fma(p, f, Simd::broadcast(0x1.ebdb68p-3f));
    p = Simd::fma(p, f, Simd::broadcast(0x1.62e4bap-1f));
  } else {
    static_assert(kDegree == 4, "no such polynomial");
    p = Simd::broadcast(0x1.b7f7b0p-7f);
    p = Simd::fma(p, f, Simd::broadcast(0x1.abf838p-5f));
    p = Simd::fma(p, f, Simd::broadcast(0x1.ee2456p-3f));
    p = Simd::fma(p, f, Simd::broadcast(0x1.62d6c6p-1f));
  }
  p = Simd::fma(p, f, Simd::broadcast(1.0f));
  return Simd::times_power(p, x);
}

// Prefetches the lines of a later chunk, even past the end of a row, where the next one usually is;
// a prefetch cannot fault.
template <typename Element>
void prefetch_chunk(const Element* chunk) {
  constexpr size_t kLineBytes = 64;
  const uintptr_t ahead = reinterpret_cast<uintptr_t>(chunk) + kPrefetchBytes;
  for (size_t offset = 0; offset < kChunk * sizeof(Element); offset += kLineBytes) {
    __builtin_prefetch(reinterpret_cast<const void*>(ahead + offset));
  }
}

struct BlockSums {
  Float max;  // raw logits; ignores NaN
  Float sum;
  Float weighted;
};

// Sums of count columns, a multiple of kChunk, relative to 2^shift. Without the clamp a column of
// -inf makes the weighted sum NaN.
template <bool kClamp, typename Element>
BlockSums block_sums(const Element* logits_V, int64_t count, float scale, float shift) {
  const Simd::Exponent exponent(scale, shift);
  const Float least = Simd::broadcast(kMinExponent);
  Float max[kUnroll];
  Float sum[kUnroll];
  Float weighted[kUnroll];
  for (int i = 0; i < kUnroll; ++i) {
    max[i] = Simd::broadcast(-kInfinity);
    sum[i] = weighted[i] = Simd::broadcast(0.0f);
  }
  for (int64_t j = 0; j < count; j += kChunk) {
    prefetch_chunk(logits_V + j);
    Float x[kUnroll];
    for (int i = 0; i < kUnroll; i += 2) Simd::load_pair(logits_V + j + i * Simd::kWidth, x + i);
    for (int i = 0; i < kUnroll; ++i) {
      Float e2 = exponent(x[i]);
      if constexpr (kClamp) e2 = Simd::max(least, e2);
      const Float power = exp2_vector<5>(e2);
      max[i] = Simd::max(x[i], max[i]);
      sum[i] = Simd::add(sum[i], power);
      weighted[i] = Simd::fma(power, e2, weighted[i]);
    }
  }
  return {Simd::max(Simd::max(max[0], max[1]), Simd::max(max[2], max[3])),
          Simd::add(Simd::add(sum[0], sum[1]), Simd::add(sum[2], sum[3])),
          Simd::add(Simd::add(weighted[0], weighted[1]), Simd::add(weighted[2], weighted[3]))};
}

template <typename Element>
float block_max(const Element* logits_V, int64_t count) {
  Float max = Simd::broadcast(-kInfinity);
  for (int64_t j = 0; j < count; j += Simd::kWidth) {
    max = Simd::max(Simd::load(logits_V + j), max);
  }
  return Simd::reduce_max(max);
}

// Sums so far, relative to 2^(reference k). The reference is the maximum of an earlier block, so
// that no pass has to find the row's first. A block that exceeds it by more than 2^kSlack is summed
// again, from the cache, with its own maximum as the reference.
class RowSums {
 public:
  explicit RowSums(float scale) : scale_(scale) {}

  template <typename Element>
  void add(const Element* logits_V, int64_t count) {
    if (reference_ == -kInfinity) set_reference(block_max(logits_V, count));
    BlockSums block = block_sums<false>(logits_V, count, scale_, shift_);
    const float block_top = Simd::reduce_max(block.max);
    if ((block_top - reference_) * scale_ > kSlack) {
      set_reference(block_top);
      block = block_sums<false>(logits_V, count, scale_, shift_);
    }
    if (Simd::has_nan(block.weighted)) block = block_sums<true>(logits_V, count, scale_, shift_);
    max_ = block_top > max_ ? block_top : max_;
    sum_ = Simd::add(sum_, block.sum);
    weighted_ = Simd::add(weighted_, block.weighted);
  }

  ShiftedSums finish() const {
    if (max_ == kInfinity) return {kNaN, kNaN, kNaN};  // whatever the vectors made of inf - inf
    return rescale(sums(), max_, scale_);
  }

 private:
  ShiftedSums sums() const {
    return {reference_, Simd::reduce_add(sum_), Simd::reduce_add(weighted_)};
  }

  void set_reference(float reference) {
    const ShiftedSums moved = rescale(sums(), reference, scale_);
    const Float share = Simd::broadcast(1.0f / Simd::kWidth);
    sum_ = Simd::mul(share, Simd::broadcast(moved.sum));
    weighted_ = Simd::mul(share, Simd::broadcast(moved.weighted));
    reference_ = reference;
    // While there is nothing but -inf, any finite shift gives terms of 0 and lets NaN through.
    shift_ = reference == -kInfinity ? 0.0f : reference * scale_;
  }

  float scale_;
  float reference_ = -kInfinity;
  float shift_ = 0.0f;
  float max_ = -kInfinity;
  Float sum_ = Simd::broadcast(0.0f);
  Float weighted_ = Simd::broadcast(0.0f);
};

// -inf as bits of the type: adds nothing to the sums.
template <typename Element>
void fill_with_minus_infinity(Element* values, int64_t count) {
  for (int64_t j = 0; j < count; ++j) values[j] = from_float<Element>(-kInfinity);
}

template <typename Element>
ShiftedSums row_sums(const void* row, int64_t num_columns, float scale) {
  const Element* logits_V = static_cast<const Element*>(row);
  const int64_t whole = num_columns / kChunk * kChunk;
  RowSums sums(scale);
  for (int64_t j = 0; j < whole; j += kBlock) {
    sums.add(logits_V + j, whole - j < kBlock ? whole - j : kBlock);
  }
  if (whole < num_columns) {
    Element tail[kChunk];
    fill_with_minus_infinity(tail, kChunk);
    std::memcpy(tail, logits_V + whole, (num_columns - whole) * sizeof(Element));
    sums.add(tail, kChunk);
  }
  return sums.finish();
}

template <typename Element>
void chunk_gradient(Element* logits_V, int64_t count, const RowGradient& row) {
  constexpr int kDegree = sizeof(Element) == 2 ? 4 : 5;
  const Simd::Exponent exponent(row.scale, row.shift);
  const Float norm = Simd::broadcast(row.norm);
  const Float slope = Simd::broadcast(row.slope);
  const Float offset = Simd::broadcast(row.offset);
  const Float least = Simd::broadcast(kMinExponent);
  for (int64_t j = 0; j < count; j += kChunk) {
    prefetch_chunk(logits_V + j);
    for (int i = 0; i < kUnroll; i += 2) {
      Float pair[2];
      Simd::load_pair(logits_V + j + i * Simd::kWidth, pair);
      for (Float& x : pair) {
        const Float e2 = Simd::max(least, Simd::sub(exponent(x), norm));
        x = Simd::mul(exp2_vector<kDegree>(e2), Simd::fma(slope, e2, offset));
      }
      Simd::store_pair(logits_V + j + i * Simd::kWidth, pair);
    }
  }
}

template <typename Element>
void row_gradient_in_place(void* row, int64_t num_columns, const RowGradient& gradient) {
  Element* logits_V = static_cast<Element*>(row);
  const int64_t whole = num_columns / kChunk * kChunk;
  chunk_gradient(logits_V, whole, gradient);
  if (whole < num_columns) {
    Element tail[kChunk];
    fill_with_minus_infinity(tail, kChunk);
    const size_t bytes = (num_columns - whole) * sizeof(Element);
    std::memcpy(tail, logits_V + whole, bytes);
    chunk_gradient(tail, kChunk, gradient);
    std::memcpy(logits_V + whole, tail, bytes);
  }
}

constexpr RowKernels kRowKernels = {
    {row_sums<float>, row_sums<BFloat16>, row_sums<Half>},
    {row_gradient_in_place<float>, row_gradient_in_place<BFloat16>, row_gradient_in_place<Half>}};
