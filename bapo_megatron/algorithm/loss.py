"""The policy loss and how token losses become the loss of one update.

The loss of an update is Σ_t weight_t · loss_t over all its tokens, on every rank and in every
micro-batch. Weights hold the *global* denominators, so partial sums simply add up: neither
micro-batching nor the number of ranks changes the gradient.

Shape legend: T = response tokens of a micro-batch, R = responses of an update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from bapo_megatron.algorithm.clipping import ClipRule
from bapo_megatron.algorithm.masked import masked_sum
from bapo_megatron.types import ClipBounds

Aggregation = Literal["token_mean", "sequence_mean", "token_sum_norm"]

LOG_RATIO_LIMIT = 20.0
"""|ℓ − μ| is clamped to this before the exponential; the extension uses the same constant."""


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts over one whole update: all micro-batches of all data- and context-parallel ranks."""

    tokens: float
    """Tokens with m = 1."""
    responses: float
    """Responses with at least one such token."""

    @classmethod
    def count(cls, response_tokens_R: Tensor) -> Self:
        """Count from Σm of each response [R]; each response must appear once."""
        return cls(
            tokens=float(response_tokens_R.sum().item()),
            responses=float((response_tokens_R > 0).sum().item()),
        )


def token_weights(
    mask_T: Tensor,
    response_tokens_T: Tensor,
    aggregation: Aggregation,
    denominators: Denominators,
    constant: float = 1.0,
) -> Tensor:
    """Weight each token so that Σ_t weight_t · loss_t over the whole update is its loss.

    - ``token_mean``: m / tokens;
    - ``sequence_mean``: m / (Σm of the token's response · responses), the mean of response means;
    - ``token_sum_norm``: m / (responses · constant).

    Args:
        mask_T: [T], 1 for tokens that train, else 0.
        response_tokens_T: [T] Σm over the *whole* response that the token belongs to, also where
            context parallelism or masking leaves only a part of it here.
        aggregation: How token losses are combined.
        denominators: Counts over the whole update.
        constant: The constant of ``token_sum_norm``.

    Returns:
        [T] float32 weights, 0 where the mask is 0.

    Raises:
        ValueError: For an unknown aggregation or a constant that is not positive.
    """
    if not constant > 0:
        raise ValueError(f"token_sum_norm_constant must be > 0, got {constant}")
    one_T = torch.ones_like(mask_T, dtype=torch.float64)
    if aggregation == "token_mean":
        divisor_T = one_T * denominators.tokens
    elif aggregation == "sequence_mean":
        divisor_T = response_tokens_T.to(torch.float64) * denominators.responses
    elif aggregation == "token_sum_norm":
        divisor_T = one_T * (denominators.responses * constant)
    else:
        raise ValueError(
            "loss_aggregation must be token_mean, sequence_mean or token_sum_norm, "
            f"got {aggregation!r}"
        )
    return torch.where(mask_T > 0, 1.0 / divisor_T, 0.0).to(torch.float32)


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums and counts over tokens with m = 1; scalars in float64, without gradient.

    They add up over micro-batches and ranks.
    """

    tokens: Tensor
    """Tokens with m = 1."""
    positive_tokens: Tensor
    """… of them with A > 0."""
    policy_loss: Tensor
    """Σ weight · policy loss; over a whole update this is ``loss/policy``."""
    entropy: Tensor
    """Σ entropy of the policy at each token (0 where no entropy was given)."""
    kl_behaviour: Tensor
    """Σ (r − 1 − log r): k3 estimate of KL(behaviour ‖ policy)."""
    clipped_high: Tensor
    """Tokens with A > 0 held by the upper bound."""
    clipped_low: Tensor
    """Tokens with A < 0 held by the lower bound."""
    clipped_dual: Tensor
    """Tokens with A < 0 held by the dual clip."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss of one micro-batch."""

    loss: Tensor
    """Scalar Σ weight · loss, differentiable in log-probs and entropy; already divided by the
    global denominators."""
    sums: LossSums
    """What the step reports."""


def policy_loss(
    logprob_T: Tensor,
    *,
    behaviour_logprob_T: Tensor,
    advantage_T: Tensor,
    mask_T: Tensor,
    loss_weight_T: Tensor,
    rule: ClipRule,
    bounds: ClipBounds,
    entropy_T: Tensor | None = None,
    entropy_coefficient: float = 0.0,
) -> PolicyLoss:
    """Compute −Σ weight · min(r·A, clip(r)·A) − entropy_coefficient · Σ weight · H.

    Tokens with mask 0 have neither value nor gradient, whatever their inputs hold.

    Args:
        logprob_T: [T] ℓ, current log-probs, with gradient.
        behaviour_logprob_T: [T] μ.
        advantage_T: [T] A.
        mask_T: [T] m, 1 for tokens that train, else 0.
        loss_weight_T: [T] from ``token_weights``.
        rule: The clip rule.
        bounds: The bounds that the rule chose for this update.
        entropy_T: [T] entropies H; needed where ``entropy_coefficient`` is not 0.
        entropy_coefficient: Weight of the entropy bonus; at 0 no gradient reaches ``entropy_T``.

    Returns:
        The loss and the sums to report.

    Raises:
        ValueError: If an entropy bonus is asked for and no entropy given.
    """
    trains_T = mask_T > 0
    log_ratio_T = torch.where(trains_T, _clamped_log_ratio(logprob_T, behaviour_logprob_T), 0)
    ratio_T = log_ratio_T.double().exp().to(logprob_T.dtype)
    surrogate = rule.surrogate(ratio_T, torch.where(trains_T, advantage_T, 0), bounds)

    policy_T = -surrogate.value_T
    weighted_policy_T = loss_weight_T * policy_T
    loss_T = weighted_policy_T
    if entropy_coefficient != 0:
        if entropy_T is None:
            raise ValueError(
                f"entropy_coefficient is {entropy_coefficient} but no entropy was computed; "
                "pass entropy_T"
            )
        entropy_bonus_T = torch.where(trains_T, entropy_T, 0)
        loss_T = loss_T - entropy_coefficient * loss_weight_T * entropy_bonus_T
    # A KL term against a reference model would be added to loss_T here.

    with torch.no_grad():
        exact_log_ratio_T = log_ratio_T.detach().double()
        sums = LossSums(
            tokens=masked_sum(trains_T, mask_T),
            positive_tokens=masked_sum(advantage_T > 0, mask_T),
            policy_loss=masked_sum(weighted_policy_T, mask_T),
            entropy=masked_sum(
                torch.zeros_like(log_ratio_T) if entropy_T is None else entropy_T, mask_T
            ),
            kl_behaviour=masked_sum(torch.expm1(exact_log_ratio_T) - exact_log_ratio_T, mask_T),
            clipped_high=masked_sum(surrogate.high_T, mask_T),
            clipped_low=masked_sum(surrogate.low_T, mask_T),
            clipped_dual=masked_sum(surrogate.dual_T, mask_T),
        )
    return PolicyLoss(loss=loss_T.sum(), sums=sums)


def _clamped_log_ratio(logprob_T: Tensor, behaviour_logprob_T: Tensor) -> Tensor:
    return (logprob_T - behaviour_logprob_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
