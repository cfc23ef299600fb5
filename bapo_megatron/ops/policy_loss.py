"""The clipped policy loss of a micro-batch and its gradient.

With r = exp(clamp(ℓ − μ, ±20)) in float32 and the bounds [c_low, c_high] of the update,

    loss = Σ weight · −A · min(r, c_high)           over tokens with A > 0
         + Σ weight · −A · clamp(r, c_low, dual)    over tokens with A < 0
         − entropy_coefficient · Σ weight · H.

Shape legend: T = response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from bapo_megatron.ops.backend import Kernels, select_kernels

LOSS_SUMS = (
    "tokens",
    "positive_tokens",
    "signed_tokens",
    "policy_loss",
    "weighted_entropy",
    "entropy",
    "kl_behaviour",
    "clipped_high",
    "clipped_low",
    "clipped_dual",
    "nonfinite_tokens",
)
"""Sums over tokens with mask 1, in order (csrc/common/token_loss.h); float64."""


def clipped_policy_loss(
    logprob_T: Tensor,
    *,
    behaviour_logprob_T: Tensor,
    advantage_T: Tensor,
    mask_T: Tensor,
    loss_weight_T: Tensor,
    bounds: Tensor,
    dual_clip: float | None,
    entropy_T: Tensor | None = None,
    entropy_coefficient: float = 0.0,
    kernels: Kernels | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the loss, differentiable in log-probs and entropies, and what the step reports.

    Tokens with mask 0 have neither value nor gradient, whatever they hold. A token with mask 1
    whose log-prob, behaviour log-prob or advantage is not finite is counted and has neither, too.

    Args:
        logprob_T: [T] float32 ℓ, with gradient.
        behaviour_logprob_T: [T] float32 μ.
        advantage_T: [T] float32 A.
        mask_T: [T] float32 m, 1 for tokens that train, else 0.
        loss_weight_T: [T] float32, m over the global denominators of the update.
        bounds: ``BOUNDS_FIELDS`` on the device, from ``ops.contributions``; low and high are read.
        dual_clip: Upper limit of r for negative advantages, or None.
        entropy_T: [T] float32 H; needed where ``entropy_coefficient`` is not 0, else reported.
        entropy_coefficient: Weight of the entropy bonus; at 0 no gradient reaches ``entropy_T``.
        kernels: None: the best for the device.

    Returns:
        The loss, a scalar of the log-probs' dtype; ``LOSS_SUMS`` [11] float64 without gradient.

    Raises:
        ValueError: If an entropy bonus is asked for and no entropy given.
    """
    if entropy_coefficient != 0 and entropy_T is None:
        raise ValueError(
            f"entropy_coefficient is {entropy_coefficient} but no entropy was computed; "
            "pass entropy_T"
        )
    if kernels is None:
        kernels = select_kernels("auto", logprob_T.device)
    tokens = (behaviour_logprob_T, advantage_T, mask_T, loss_weight_T)
    loss, sums = _ClippedPolicyLoss.apply(  # type: ignore[no-untyped-call]
        logprob_T, entropy_T, tokens, bounds, (dual_clip, entropy_coefficient), kernels
    )
    return loss, sums


def entropy_gradient(
    logprob_T: Tensor,
    behaviour_logprob_T: Tensor,
    advantage_T: Tensor,
    mask_T: Tensor,
    loss_weight_T: Tensor,
) -> Tensor:
    """Return ∂(Σ weight · H)/∂H [T]: the weight of the tokens that the sum takes, else 0.

    It takes tokens with mask 1 whose log-prob, behaviour log-prob and advantage are finite: others
    are reported, not spread.
    """
    finite_T = (
        torch.isfinite(logprob_T)
        & torch.isfinite(behaviour_logprob_T)
        & torch.isfinite(advantage_T)
    )
    return torch.where((mask_T != 0) & finite_T, loss_weight_T, 0)


class _ClippedPolicyLoss(torch.autograd.Function):
    """Keeps one float per token: the derivative, which the forward pass knows."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        logprob_T: Tensor,
        entropy_T: Tensor | None,
        tokens: tuple[Tensor, Tensor, Tensor, Tensor],
        bounds: Tensor,
        settings: tuple[float | None, float],
        kernels: Kernels,
    ) -> tuple[Tensor, Tensor]:
        dual_clip, entropy_coefficient = settings
        sums, coefficient_T = kernels.policy_loss(logprob_T, entropy_T, *tokens, bounds, dual_clip)
        bonus_T = None
        if entropy_coefficient != 0:
            bonus_T = entropy_gradient(logprob_T, *tokens) * -entropy_coefficient
        ctx.save_for_backward(coefficient_T, bonus_T)  # type: ignore[arg-type]  # may be None
        ctx.mark_non_differentiable(sums)
        ctx.set_materialize_grads(False)
        loss = sums[LOSS_SUMS.index("policy_loss")]
        if entropy_coefficient != 0:
            loss = loss - entropy_coefficient * sums[LOSS_SUMS.index("weighted_entropy")]
        # A tensor of its own: Megatron's pipelines free outputs and refuse views.
        return loss.to(logprob_T.dtype, copy=True), sums

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad_loss: Tensor | None, _: None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        coefficient_T, bonus_T = ctx.saved_tensors  # type: ignore[attr-defined]
        if grad_loss is None:
            return None, None, None, None, None, None
        grad_entropy_T = None if bonus_T is None else bonus_T * grad_loss
        return coefficient_T * grad_loss, grad_entropy_T, None, None, None, None
