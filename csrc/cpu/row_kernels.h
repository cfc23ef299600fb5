// The logit kernels of one instruction set, a row at a time.
#pragma once

#include <cstdint>

#include "common/logprob.h"
#include "common/params.h"

namespace bapo {

// sum 2^e and sum 2^e e over the row's columns, e = x k - shift, relative to the row's maximum.
// NaN and +inf give a NaN sum. V = num_columns >= 0 columns of the named type, adjacent, any
// alignment; scale is k.
using RowSumsFunction = ShiftedSums (*)(const void* row, int64_t num_columns, float scale);

// Overwrites each logit of the row with logit_gradient, rounded once to the type of the logits.
using RowGradientFunction = void (*)(void* row, int64_t num_columns, const RowGradient& gradient);

// Indexed by LogitType.
struct RowKernels {
  RowSumsFunction sums[3];
  RowGradientFunction gradient[3];
};

extern const RowKernels kPortableRowKernels;
#if defined(__x86_64__)
extern const RowKernels kAvx2RowKernels;
extern const RowKernels kAvx512RowKernels;
#endif

}  // namespace bapo
