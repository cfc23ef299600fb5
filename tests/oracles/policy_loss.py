"""The policy loss of Eq. 9 written out for autograd, in float64 and without any kernel.

Shape legend: T = response tokens.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class OracleLoss(NamedTuple):
    """Loss with gradient, and how many tokens each limit held."""

    loss: Tensor
    clipped_high: int
    clipped_low: int
    clipped_dual: int


def policy_loss(
    logprob_T: Tensor,
    behaviour_logprob_T: Tensor,
    advantage_T: Tensor,
    mask_T: Tensor,
    loss_weight_T: Tensor,
    *,
    low: float,
    high: float,
    dual_clip: float | None = None,
    entropy_T: Tensor | None = None,
    entropy_coefficient: float = 0.0,
) -> OracleLoss:
    """−Σ weight · max(min(r·A, clip(r)·A), dual·A where A < 0) − coefficient · Σ weight · H.

    Tokens with mask 0 take no part. Inputs are finite; r is the float32 value that decides the
    clipping, so that a token at a bound is on the same side as in the kernels.
    """
    keep_K = torch.nonzero(mask_T > 0).squeeze(1)
    current_K = logprob_T[keep_K].double()
    difference_K = (logprob_T[keep_K] - behaviour_logprob_T[keep_K]).double()
    exact_K = current_K + (difference_K - current_K).detach()
    ratio_K = exact_K.clamp(-20.0, 20.0).exp()
    ratio_K = ratio_K + (ratio_K.detach().float().double() - ratio_K.detach())
    advantage_K = advantage_T[keep_K].double()
    unclipped_K = ratio_K * advantage_K
    clipped_K = ratio_K.clamp(_float32(low), _float32(high)) * advantage_K
    value_K = torch.minimum(unclipped_K, clipped_K)
    dual = math.inf if dual_clip is None else _float32(dual_clip)
    if dual_clip is not None:
        limited_K = torch.maximum(value_K, dual * advantage_K)
        value_K = torch.where(advantage_K < 0, limited_K, value_K)
    weight_K = loss_weight_T[keep_K].double()
    loss = -(weight_K * value_K).sum()
    if entropy_T is not None:
        loss = loss - entropy_coefficient * (weight_K * entropy_T[keep_K].double()).sum()
    fixed_K = ratio_K.detach()
    return OracleLoss(
        loss=loss,
        clipped_high=int(((advantage_K > 0) & (fixed_K > _float32(high))).sum()),
        clipped_low=int(((advantage_K < 0) & (fixed_K < _float32(low))).sum()),
        clipped_dual=int(((advantage_K < 0) & (fixed_K > dual)).sum()),
    )


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
