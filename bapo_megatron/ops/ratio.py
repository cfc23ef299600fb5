"""The importance ratio of tokens, differentiable, with the bits of the bound search.

Shape legend: T = response tokens.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bapo_megatron.ops import reference
from bapo_megatron.ops.backend import Kernels, select_kernels
from bapo_megatron.ops.reference import LOG_RATIO_LIMIT as LOG_RATIO_LIMIT


def importance_ratio(
    logprob_T: Tensor, behaviour_logprob_T: Tensor, kernels: Kernels | None = None
) -> Tensor:
    """Return each token's importance ratio; nothing waits for the device.

        r = exp(clamp(ℓ − μ, ±20)),     ∂r/∂ℓ = r where |ℓ − μ| ≤ 20, else 0.

    In float32 r has the bits that ``ops.contributions`` compares with the candidate bounds, so a
    loss and the search agree on which tokens a bound clips.

    Args:
        logprob_T: [T] float32 or float64, ℓ; differentiable.
        behaviour_logprob_T: [T] of the same dtype, μ; it gets no gradient.
        kernels: For float32; None: the best for the device. Float64 is plain PyTorch, for
            ``gradcheck``.

    Returns:
        [T] of the same dtype. NaN, with derivative 0, where ℓ or μ is NaN or infinite.

    Raises:
        RuntimeError: For other dtypes or shapes, or tensors on two devices.
    """
    if logprob_T.dtype == torch.float64:
        kernels = reference.KERNELS
    elif kernels is None:
        kernels = select_kernels("auto", logprob_T.device)
    ratio_T: Tensor = _ImportanceRatio.apply(logprob_T, behaviour_logprob_T, kernels)
    return ratio_T


class _ImportanceRatio(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logprob_T: Tensor, behaviour_logprob_T: Tensor, kernels: Kernels
    ) -> Tensor:
        ratio_T: Tensor = kernels.importance_ratio(
            logprob_T.contiguous(), behaviour_logprob_T.contiguous()
        )
        ctx.save_for_backward(logprob_T, behaviour_logprob_T, ratio_T)
        return ratio_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None]:
        logprob_T, behaviour_logprob_T, ratio_T = ctx.saved_tensors
        # False where ℓ or μ is not finite.
        moves_T = (logprob_T - behaviour_logprob_T).abs_() <= LOG_RATIO_LIMIT
        return torch.where(moves_T, grad_T * ratio_T, 0.0), None, None
