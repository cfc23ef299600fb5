// Overwrites a student's logits with their gradient: each logit of both rows read once.
#include "cuda/device.cuh"
#include "cuda/launch.h"
#include "cuda/logits.cuh"
#include "cuda/overwrite_row.cuh"

namespace bapo {
namespace {

constexpr int kBlocksPerProcessor = 3;

template <KlDirection kDirection>
struct KlJob {
  static constexpr bool kHasTeacher = true;

  KlGradient token;
  bool is_zero;
  int target_column;

  __device__ __forceinline__ float at_target() const { return token.row.at_target; }
  __device__ __forceinline__ float gradient(float logit, float teacher_logit) const {
    return kl_logit_gradient<kDirection>(logit, teacher_logit, token);
  }
};

// Per token t, with p and q the probabilities of student and teacher (common/kl.h), the gradient of
// logits_backward plus
//   grad_kl p_j (log p_j - log q_j - kl) / temperature   (reverse),
//   grad_kl (p_j - q_j) / temperature                    (forward),
// computed in float32 and rounded once. Zeros in padded columns and where all gradients are 0.
// Grid: one block of kOverwriteThreads per token. student and teacher [T, V], all else [T].
template <typename Element, KlDirection kDirection>
__global__ void __launch_bounds__(kOverwriteThreads, kBlocksPerProcessor)
    kl_backward_kernel(const __grid_constant__ KlBackwardParams params) {
  const Logits& student = params.student;
  const int64_t token = blockIdx.x;
  Element* row = static_cast<Element*>(student.data) + token * student.row_stride;
  const Element* teacher_row =
      static_cast<const Element*>(params.teacher.data) + token * params.teacher.row_stride;
  KlJob<kDirection> job = {{}, has_no_gradient(params, token), -1};
  if (!job.is_zero) {
    job.token = token_gradient(params, token);
    job.target_column = local_column(student, params.target[token]);
  }
  overwrite_row(row, teacher_row, student, job);
}

}  // namespace
}  // namespace bapo

extern "C" int bapo_launch_kl_backward(const bapo::KlBackwardParams* params, void* stream) {
  if (params->num_tokens == 0) return cudaSuccess;
  if (params->student.num_columns > bapo::kMaxColumns) return cudaErrorInvalidValue;
  return bapo::dispatch_element(params->student.type, [&](auto element) {
    using Element = decltype(element);
    const auto kernel = params->direction == bapo::KlDirection::kReverse
                            ? bapo::kl_backward_kernel<Element, bapo::KlDirection::kReverse>
                            : bapo::kl_backward_kernel<Element, bapo::KlDirection::kForward>;
    return bapo::launch(kernel, params->num_tokens, bapo::kOverwriteThreads, stream, *params);
  });
}
