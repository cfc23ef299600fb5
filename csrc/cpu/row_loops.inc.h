// The row loops of the logit kernels, once for all instruction sets.
//
// row_sums:              sum 2^e and sum 2^e e, e = x k - shift, over row [V]; one read.
// row_gradient_in_place: x = p (slope e2 + offset) over row [V], p = 2^e2; one read, one write.
// kl_row_sums and kl_row_gradient_in_place: the same of a student's row beside a teacher's, whose
//   logits are read once too.
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
//   where_minus_infinity(x, a, b)        a where x is -inf, else b
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

// Where the powers 2^e of a block are kept, in the order of load_pair.
struct Powers {
  alignas(64) float values[kBlock];

  BAPO_HD void keep(int64_t j, const Float* pair) { Simd::store_pair(values + j, pair); }
};

struct NoPowers {
  BAPO_HD void keep(int64_t, const Float*) {}
};

// Sums of count columns, a multiple of kChunk, relative to 2^shift. Without the clamp a column of
// -inf makes the weighted sum NaN.
template <bool kClamp, typename Element, typename Kept>
BlockSums block_sums(const Element* logits_V, int64_t count, float scale, float shift, Kept& kept) {
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
    Float power[kUnroll];
    for (int i = 0; i < kUnroll; ++i) {
      Float e2 = exponent(x[i]);
      if constexpr (kClamp) e2 = Simd::max(least, e2);
      power[i] = exp2_vector<5>(e2);
      max[i] = Simd::max(x[i], max[i]);
      sum[i] = Simd::add(sum[i], power[i]);
      weighted[i] = Simd::fma(power[i], e2, weighted[i]);
    }
    for (int i = 0; i < kUnroll; i += 2) kept.keep(j + i * Simd::kWidth, power + i);
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

  // Returns the sum of the block's powers, which are kept relative to 2^shift().
  template <typename Element, typename Kept>
  Float add(const Element* logits_V, int64_t count, Kept& kept) {
    if (reference_ == -kInfinity) set_reference(block_max(logits_V, count));
    BlockSums block = block_sums<false>(logits_V, count, scale_, shift_, kept);
    const float block_top = Simd::reduce_max(block.max);
    if ((block_top - reference_) * scale_ > kSlack) {
      set_reference(block_top);
      block = block_sums<false>(logits_V, count, scale_, shift_, kept);
    }
    if (Simd::has_nan(block.weighted)) {
      block = block_sums<true>(logits_V, count, scale_, shift_, kept);
    }
    max_ = block_top > max_ ? block_top : max_;
    sum_ = Simd::add(sum_, block.sum);
    weighted_ = Simd::add(weighted_, block.weighted);
    return block.sum;
  }

  float reference() const { return reference_; }
  float shift() const { return shift_; }
  float max() const { return max_; }

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

int64_t whole_chunks(int64_t num_columns) { return num_columns / kChunk * kChunk; }

// The columns after the last whole chunk, filled up with -inf, which adds nothing to the sums.
template <typename Element>
struct Tail {
  Tail(const Element* row_V, int64_t num_columns)
      : bytes((num_columns - whole_chunks(num_columns)) * sizeof(Element)) {
    for (Element& value : values) value = from_float<Element>(-kInfinity);
    std::memcpy(values, row_V + whole_chunks(num_columns), bytes);
  }

  size_t bytes;
  Element values[kChunk];
};

template <typename Element>
ShiftedSums row_sums(const void* row, int64_t num_columns, float scale) {
  const Element* logits_V = static_cast<const Element*>(row);
  const int64_t whole = whole_chunks(num_columns);
  RowSums sums(scale);
  NoPowers none;
  for (int64_t j = 0; j < whole; j += kBlock) {
    sums.add(logits_V + j, whole - j < kBlock ? whole - j : kBlock, none);
  }
  if (whole < num_columns) sums.add(Tail<Element>(logits_V, num_columns).values, kChunk, none);
  return sums.finish();
}

// Cross sums of a block from the powers of its first row (common/kl.h): sum 2^e (e - e') and, where
// e' is -inf and has its floor instead, sum 2^e. Without the clamp any -inf makes the sum infinite
// or NaN.
template <bool kClamp, typename Element>
CrossSums<float> block_cross_sums(const Powers& powers, const Element* first_V,
                                  const Element* second_V, int64_t count,
                                  const Simd::Exponent& first, const Simd::Exponent& second) {
  const Float least = Simd::broadcast(kMinExponent);
  const Float zero = Simd::broadcast(0.0f);
  Float cross[kUnroll];
  Float floored[kUnroll];
  for (int i = 0; i < kUnroll; ++i) cross[i] = floored[i] = zero;
  for (int64_t j = 0; j < count; j += kChunk) {
    for (int i = 0; i < kUnroll; i += 2) {
      Float x[2], y[2], power[2];
      Simd::load_pair(first_V + j + i * Simd::kWidth, x);
      Simd::load_pair(second_V + j + i * Simd::kWidth, y);
      Simd::load_pair(powers.values + j + i * Simd::kWidth, power);
      for (int lane = 0; lane < 2; ++lane) {
        Float e = first(x[lane]);
        Float other = second(y[lane]);
        if constexpr (kClamp) {
          const Float held = Simd::where_minus_infinity(other, power[lane], zero);
          floored[i + lane] = Simd::add(floored[i + lane], held);
          e = Simd::max(least, e);
          other = Simd::where_minus_infinity(other, least, other);
        }
        cross[i + lane] = Simd::fma(power[lane], Simd::sub(e, other), cross[i + lane]);
      }
    }
  }
  const auto total = [](const Float* sums) {
    return Simd::reduce_add(Simd::add(Simd::add(sums[0], sums[1]), Simd::add(sums[2], sums[3])));
  };
  return {0.0f, total(cross), total(floored)};
}

// Sums so far of both rows. Those of each row alone have the bits that row_sums gives.
class KlRowSums {
 public:
  explicit KlRowSums(float scale) : scale_(scale), first_(scale), second_(scale) {}

  template <typename Element>
  void add(const Element* first_V, const Element* second_V, int64_t count) {
    const float first_reference = first_.reference();
    const float second_reference = second_.reference();
    Powers powers;
    NoPowers none;
    const Float sum = first_.add(first_V, count, powers);
    second_.add(second_V, count, none);
    move(first_reference, first_.reference(), second_reference, second_.reference());

    const Simd::Exponent first(scale_, first_.shift());
    const Simd::Exponent second(scale_, second_.shift());
    CrossSums<float> block =
        block_cross_sums<false>(powers, first_V, second_V, count, first, second);
    if (!(block.cross - block.cross == 0.0f)) {
      block = block_cross_sums<true>(powers, first_V, second_V, count, first, second);
    }
    cross_.sum += Simd::reduce_add(sum);
    cross_.cross += block.cross;
    cross_.floored += block.floored;
  }

  KlSums finish() {
    move(first_.reference(), first_.max(), second_.reference(), second_.max());
    return {first_.finish(), second_.finish(), cross_};
  }

 private:
  void move(float first_from, float first_to, float second_from, float second_to) {
    cross_ = move_references(cross_, reference_step(first_from, first_to, scale_),
                             reference_step(second_from, second_to, scale_));
  }

  float scale_;
  RowSums first_;
  RowSums second_;
  CrossSums<float> cross_ = {0.0f, 0.0f, 0.0f};
};

template <typename Element>
KlSums kl_row_sums(const void* first, const void* second, int64_t num_columns, float scale) {
  const Element* first_V = static_cast<const Element*>(first);
  const Element* second_V = static_cast<const Element*>(second);
  const int64_t whole = whole_chunks(num_columns);
  KlRowSums sums(scale);
  for (int64_t j = 0; j < whole; j += kBlock) {
    sums.add(first_V + j, second_V + j, whole - j < kBlock ? whole - j : kBlock);
  }
  if (whole < num_columns) {
    const Tail<Element> tail(first_V, num_columns);
    sums.add(tail.values, Tail<Element>(second_V, num_columns).values, kChunk);
  }
  return sums.finish();
}

// logit_gradient of common/logprob.h, by vectors.
template <int kDegree>
struct VectorGradient {
  static constexpr bool kHasTeacher = false;

  BAPO_HD explicit VectorGradient(const RowGradient& row)
      : exponent(row.scale, row.shift),
        norm(Simd::broadcast(row.norm)),
        slope(Simd::broadcast(row.slope)),
        offset(Simd::broadcast(row.offset)) {}

  BAPO_HD static Float clamp(Float e2) { return Simd::max(Simd::broadcast(kMinExponent), e2); }
  BAPO_HD Float operator()(Float x, Float) const {
    const Float e2 = clamp(Simd::sub(exponent(x), norm));
    return Simd::mul(exp2_vector<kDegree>(e2), Simd::fma(slope, e2, offset));
  }

  Simd::Exponent exponent;
  Float norm;
  Float slope;
  Float offset;
};

// kl_logit_gradient of common/kl.h, by vectors.
template <int kDegree, KlDirection kDirection>
struct VectorKlGradient {
  static constexpr bool kHasTeacher = true;

  BAPO_HD explicit VectorKlGradient(const KlGradient& gradient)
      : student(gradient.row),
        exponent(gradient.row.scale, gradient.teacher_shift),
        norm(Simd::broadcast(gradient.teacher_norm)),
        slope(Simd::broadcast(gradient.slope)) {}

  BAPO_HD Float operator()(Float x, Float y) const {
    const Float raw = student.exponent(x);
    const Float e2 = student.clamp(Simd::sub(raw, student.norm));
    const Float p = exp2_vector<kDegree>(e2);
    const Float factor = Simd::fma(student.slope, e2, student.offset);
    Float q2 = exponent(y);
    if constexpr (kDirection == KlDirection::kReverse) {
      q2 = Simd::sub(Simd::where_minus_infinity(q2, Simd::broadcast(kMinExponent), q2), norm);
      return Simd::mul(p, Simd::fma(slope, Simd::sub(e2, q2), factor));
    } else {
      const Float q = exp2_vector<kDegree>(student.clamp(Simd::sub(q2, norm)));
      const Float value = Simd::fma(slope, Simd::sub(p, q), Simd::mul(p, factor));
      return Simd::where_minus_infinity(raw, Simd::broadcast(0.0f), value);
    }
  }

  VectorGradient<kDegree> student;
  Simd::Exponent exponent;
  Float norm;
  Float slope;
};

template <typename Element, typename Gradient>
void chunk_gradient(Element* logits_V, const Element* teacher_V, int64_t count,
                    const Gradient& gradient) {
  for (int64_t j = 0; j < count; j += kChunk) {
    prefetch_chunk(logits_V + j);
    if constexpr (Gradient::kHasTeacher) prefetch_chunk(teacher_V + j);
    for (int i = 0; i < kUnroll; i += 2) {
      const int64_t k = j + i * Simd::kWidth;
      Float pair[2];
      Float teacher_pair[2] = {};
      Simd::load_pair(logits_V + k, pair);
      if constexpr (Gradient::kHasTeacher) Simd::load_pair(teacher_V + k, teacher_pair);
      for (int n = 0; n < 2; ++n) pair[n] = gradient(pair[n], teacher_pair[n]);
      Simd::store_pair(logits_V + k, pair);
    }
  }
}

// The teacher's row is any row where the gradient reads none.
template <typename Element, typename Gradient>
void overwrite_columns(void* row, const void* teacher, int64_t num_columns,
                       const Gradient& gradient) {
  Element* logits_V = static_cast<Element*>(row);
  const Element* teacher_V = static_cast<const Element*>(teacher);
  const int64_t whole = whole_chunks(num_columns);
  chunk_gradient(logits_V, teacher_V, whole, gradient);
  if (whole < num_columns) {
    Tail<Element> tail(logits_V, num_columns);
    chunk_gradient(tail.values, Tail<Element>(teacher_V, num_columns).values, kChunk, gradient);
    std::memcpy(logits_V + whole, tail.values, tail.bytes);
  }
}

template <typename Element>
constexpr int kGradientDegree = sizeof(Element) == 2 ? 4 : 5;

template <typename Element>
void row_gradient_in_place(void* row, int64_t num_columns, const RowGradient& gradient) {
  overwrite_columns<Element>(row, row, num_columns,
                             VectorGradient<kGradientDegree<Element>>(gradient));
}

template <typename Element, KlDirection kDirection>
void kl_row_gradient_in_place(void* student, const void* teacher, int64_t num_columns,
                              const KlGradient& gradient) {
  overwrite_columns<Element>(student, teacher, num_columns,
                             VectorKlGradient<kGradientDegree<Element>, kDirection>(gradient));
}

constexpr KlDirection kReverse = KlDirection::kReverse;
constexpr KlDirection kForward = KlDirection::kForward;

constexpr RowKernels kRowKernels = {
    {row_sums<float>, row_sums<BFloat16>, row_sums<Half>},
    {row_gradient_in_place<float>, row_gradient_in_place<BFloat16>, row_gradient_in_place<Half>},
    {kl_row_sums<float>, kl_row_sums<BFloat16>, kl_row_sums<Half>},
    {{kl_row_gradient_in_place<float, kReverse>, kl_row_gradient_in_place<BFloat16, kReverse>,
      kl_row_gradient_in_place<Half, kReverse>},
     {kl_row_gradient_in_place<float, kForward>, kl_row_gradient_in_place<BFloat16, kForward>,
      kl_row_gradient_in_place<Half, kForward>}}};
