// The logit kernels of one instruction set, a row at a time.
#pragma once

#include <cstdint>

#include "common/kl.h"
#include "common/logprob.h"
#include "common/params.h"

namespace bapo {

// sum 2^e and sum 2^e e over the row's columns, e = x k - shift, relative to the row's maximum.
// NaN and +inf give a NaN sum. V = num_columns >= 0 columns of the named type, adjacent, any
// alignment; scale is k.
using RowSumsFunction = ShiftedSums (*)(const void* row, int64_t num_columns, float scale);

// Overwrites each logit of the row with logit_gradient, rounded once to the type of the logits.
using RowGradientFunction = void (*)(void* row, int64_t num_columns, const RowGradient& gradient);

// The same sums of two rows, and their cross sums, by one read of each.
using KlSumsFunction = KlSums (*)(const void* first, const void* second, int64_t num_columns,
                                  float scale);

// Overwrites each logit of the student's row with kl_logit_gradient, rounded once.
using KlGradientFunction = void (*)(void* student, const void* teacher, int64_t num_columns,
                                    const KlGradient& gradient);

// Indexed by LogitType; the gradient of the divergence by KlDirection first.
struct RowKernels {
  RowSumsFunction sums[3];
  RowGradientFunction gradient[3];
  KlSumsFunction kl_sums[3];
  KlGradientFunction kl_gradient[2][3];
};

extern const RowKernels kPortableRowKernels;
#if defined(__x86_64__)
extern const RowKernels kAvx2RowKernels;
extern const RowKernels kAvx512RowKernels;
#endif

}  // namespace bapo
