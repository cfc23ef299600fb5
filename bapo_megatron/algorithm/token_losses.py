"""Objectives that need nothing of other tokens: one function from tokens to their losses, [T].

Most weigh log π by a factor without a gradient,

    loss = −A · sg(c) · ℓ,     ∂loss/∂ℓ = −A · c,

so their losses are no estimates of what is optimised; their gradients are the published ones.
docs/objectives.md compares them. Notation: r = π/μ of the token, p = e^ℓ, q = e^μ. Shape legend:
T = response tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bapo_megatron.algorithm.clip import Clip
from bapo_megatron.algorithm.objective import Objective, TokenBatch
from bapo_megatron.config.objectives import (
    AspoConfig,
    CeGppoConfig,
    CispoConfig,
    DcpoConfig,
    DppoTvConfig,
    FixedClipConfig,
    SapoConfig,
)


@dataclass(frozen=True, slots=True)
class TokenLoss(Objective):
    """One of the functions below as an objective."""

    function: Callable[[TokenBatch], Tensor]
    """Returns the loss of each token, [T]."""
    trains_zero_advantage = False

    def loss(self, tokens: TokenBatch) -> Tensor:
        """Return the loss of each token, [T]."""
        return self.function(tokens)


def _weighted(tokens: TokenBatch, weight_T: Tensor) -> Tensor:
    return -tokens.advantage * weight_T.detach() * tokens.logprob


def reinforce(tokens: TokenBatch) -> Tensor:
    """Weigh by 1, whoever sampled the token: REINFORCE, AsymRE (arXiv 2506.20520)."""
    return -tokens.advantage * tokens.logprob


def cispo(tokens: TokenBatch, options: CispoConfig) -> Tensor:
    """Weigh by clamp(r, low, high): CISPO, MiniMax-M1 (arXiv 2506.13585), Eq. 4."""
    return _weighted(tokens, tokens.ratio.clamp(options.low, options.high))


def sapo(tokens: TokenBatch, options: SapoConfig) -> Tensor:
    """Pass r through a gate: SAPO (arXiv 2511.20347).

    loss = −A · (4/τ) · σ(τ(r − 1)) with a τ for each sign of A. The derivative, −A · 4σ(1 − σ) · r,
    is that of the plain policy gradient at r = 1 and falls smoothly on both sides.
    """
    tau_T = torch.where(tokens.advantage > 0, options.positive, options.negative)
    return -tokens.advantage * 4 / tau_T * torch.sigmoid(tau_T * (tokens.ratio - 1))


def ce_gppo(
    tokens: TokenBatch, options: CeGppoConfig, clip: FixedClipConfig, dual_clip: float | None
) -> Tensor:
    """Give clipped tokens a gradient of fixed size: CE-GPPO (arXiv 2509.20712).

    The weight is β_high · c_high where A > 0 and r > c_high, β_low · c_low where A < 0 and r <
    c_low, 0 where A < 0 and r is above the dual clip, else r.
    """
    ratio_T, advantage_T = tokens.ratio, tokens.advantage
    weight_T = torch.where(
        (advantage_T > 0) & (ratio_T > clip.high), options.beta_high * clip.high, ratio_T
    )
    is_low_T = (advantage_T < 0) & (ratio_T < clip.low)
    weight_T = torch.where(is_low_T, options.beta_low * clip.low, weight_T)
    if dual_clip is not None:
        weight_T = torch.where((advantage_T < 0) & (ratio_T > dual_clip), 0.0, weight_T)
    return _weighted(tokens, weight_T)


def aspo(tokens: TokenBatch, options: AspoConfig, clip: FixedClipConfig) -> Tensor:
    """Turn the ratio of positive tokens over: ASPO (arXiv 2510.06062).

    The weight is min(1/r, cap) where A > 0, and 0 where also r > c_high; min(r, cap) where A < 0,
    and 0 where also r < c_low. The release has wider bounds, 0.6 and 1.4, for the fifth of a
    response's tokens with the highest entropy; here all have those of ``fixed``.
    """
    ratio_T = tokens.ratio
    positive_T = torch.where(ratio_T > clip.high, 0.0, (1 / ratio_T).clamp(max=options.cap))
    negative_T = torch.where(ratio_T < clip.low, 0.0, ratio_T.clamp(max=options.cap))
    return _weighted(tokens, torch.where(tokens.advantage > 0, positive_T, negative_T))


def topr(tokens: TokenBatch) -> Tensor:
    """Weigh responses with a reward above 0 by 1, others by min(r, 1): TOPR (arXiv 2503.14286)."""
    return _weighted(tokens, torch.where(tokens.reward > 0, 1.0, tokens.ratio.clamp(max=1.0)))


def dppo_tv(tokens: TokenBatch, options: DppoTvConfig) -> Tensor:
    """Leave out tokens whose probability has moved too far: DPPO (arXiv 2602.04879).

    The weight is min(r, cap) where p − q ≤ δ (A > 0) or p − q ≥ −δ (A < 0), else 0. |p − q| is a
    lower bound of the total variation between the two policies at the token.
    """
    moved_T = tokens.logprob.exp() - tokens.behaviour_logprob.exp()
    moved_T = torch.where(tokens.advantage > 0, moved_T, -moved_T)
    weight_T = torch.where(moved_T <= options.delta, tokens.ratio.clamp(max=options.cap), 0.0)
    return _weighted(tokens, weight_T)


class Dcpo(Clip):
    """PPO's loss with bounds that are wider for unlikely tokens: DCPO (arXiv 2509.02333).

    c_low = ½ + ½√max(1 − 4ε_low/q, 0) and c_high = ½ + ½√(1 + 4ε_high/q), at most ``max_high``;
    they solve |r − 1| · p = ε.
    """

    def __init__(self, options: DcpoConfig, dual_clip: float | None) -> None:
        """Take ε of both sides."""
        self.options = options
        self.dual_clip = dual_clip

    def bounds(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return the bounds of every token, [T] each."""
        per_prob_T = 4 * torch.exp(-tokens.behaviour_logprob)
        low_T = 0.5 + 0.5 * (1 - self.options.epsilon_low * per_prob_T).clamp(min=0).sqrt()
        high_T = 0.5 + 0.5 * (1 + self.options.epsilon_high * per_prob_T).sqrt()
        return low_T, high_T.clamp(max=self.options.max_high)
