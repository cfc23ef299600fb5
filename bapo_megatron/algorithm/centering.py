"""Score centering: an off-policy gradient without the part that has nothing to do with reward.

With q of the sampler, p of the policy, the score s_v = ∇ log p_v of a token v and the objective's
own detached weight w_v = f(p_v / q_v), the gradient of a token with advantage A is

    −A · (w_a s_a − Σ_v q_v w_v s_v),

the plain one minus its mean under q (arXiv 2609.20807). The sampler's K likeliest tokens H are
known with their log-probs; outside q̂ = ρ p, ρ = (1 − Q_H) / (1 − P_H). Since Σ_v p_v s_v = 0,

    Σ_v q̂_v w_v s_v = Σ_{v∈H} c_v s_v,    c_v = q_v f(p_v / q_v) − α p_v,    α = ρ f(1 / ρ).

Shape legend: T = response tokens, K = tokens of the head.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bapo_megatron.algorithm.objective import LOG_RATIO_LIMIT, Objective, TokenBatch

MAX_TAIL_RATIO = 1000.0
"""Limit of ρ, and of 1/ρ: beyond it rounding decides what is outside the head."""
_MIN_TAIL = 2.0**-23
"""Smallest mass outside the head that log-probs in float32 can tell from 0."""


class Head(NamedTuple):
    """The coefficients of tokens of the head, and what is reported of them."""

    coefficient_TK: Tensor
    """[T, K] c, float64; 0 where there is no token."""
    policy_mass_T: Tensor
    """[T] P_H."""
    sampler_mass_T: Tensor
    """[T] Q_H."""
    is_limited_T: Tensor
    """[T] bool: ρ is at its limit."""


def head_coefficients(
    objective: Objective,
    tokens: TokenBatch,
    policy_TK: Tensor,
    sampler_TK: Tensor,
    *,
    is_whole: bool,
) -> Head:
    """Compute the coefficients of the scores of the head, in float64.

    Args:
        objective: One that ``centers``.
        tokens: The T tokens whose distributions these are.
        policy_TK: [T, K] log p of the head's tokens.
        sampler_TK: [T, K] log q of them; NaN where there is no token.
        is_whole: Whether the head is the whole vocabulary, so that nothing is outside.
    """
    has_TK = sampler_TK.isfinite() & policy_TK.isfinite()
    log_p_TK = torch.where(has_TK, policy_TK, -torch.inf).double()
    log_q_TK = torch.where(has_TK, sampler_TK, -torch.inf).double()
    p_TK, q_TK = log_p_TK.exp(), log_q_TK.exp()
    log_ratio_TK = torch.where(has_TK, log_p_TK - log_q_TK, 0.0)
    ratio_TK = log_ratio_TK.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    policy_T, sampler_T = p_TK.sum(dim=1), q_TK.sum(dim=1)
    coefficient_TK = q_TK * objective.weights(tokens, ratio_TK)
    is_limited_T = torch.zeros_like(policy_T, dtype=torch.bool)
    if not is_whole:
        rho_T = (1 - sampler_T).clamp(min=_MIN_TAIL) / (1 - policy_T).clamp(min=_MIN_TAIL)
        limited_T = rho_T.clamp(1 / MAX_TAIL_RATIO, MAX_TAIL_RATIO)
        is_limited_T = limited_T != rho_T
        weight_T = objective.weights(tokens, 1 / limited_T[:, None])[:, 0]
        coefficient_TK = coefficient_TK - (limited_T * weight_T)[:, None] * p_TK
    return Head(coefficient_TK, policy_T, sampler_T, is_limited_T)
