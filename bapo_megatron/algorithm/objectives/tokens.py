"""Objectives that need nothing about other tokens: one function from tokens to losses, [T].

Most weight log π by a detached factor,

    loss = −A · sg(c) · ℓ,     ∂loss/∂ℓ = −A · c,

so the loss does not measure what is optimised; the gradients are the published ones.
docs/objectives.md compares them. Notation: r = π/μ of the token, p = e^ℓ, q = e^μ. Shape legend:
T = response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from bapo_megatron.algorithm.objective import FunctionObjective, NamedObjective, TokenBatch
from bapo_megatron.algorithm.objectives.clip import Clip, FixedClipConfig
from bapo_megatron.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor


def _weighted(tokens: TokenBatch, weight_T: Tensor) -> Tensor:
    return -tokens.advantage * weight_T.detach() * tokens.logprob


def reinforce(tokens: TokenBatch) -> Tensor:
    """Weight by 1, whatever policy sampled the token: REINFORCE, AsymRE (arXiv 2506.20520)."""
    return -tokens.advantage * tokens.logprob


def nll(tokens: TokenBatch) -> Tensor:
    """Imitate: −R · ℓ, where the reward R of a demonstration is its weight.

    On a policy's own responses with rewards 0 and 1 it is rejection sampling (RAFT, arXiv
    2304.06767); a reward below 0 makes a response less likely, without a limit.
    """
    return -tokens.reward * tokens.logprob


class CispoConfig(Section):
    """CISPO clamps a token's weight r, but keeps its gradient."""

    low: float = Field(0.0, ge=0, le=1)
    """Smallest weight; 0: no lower limit."""
    high: float = Field(5.0, ge=1)
    """Largest weight."""


def cispo(tokens: TokenBatch, options: CispoConfig) -> Tensor:
    """Weight by clamp(r, low, high): CISPO, MiniMax-M1 (arXiv 2506.13585), Eq. 4."""
    return _weighted(tokens, tokens.ratio.clamp(options.low, options.high))


class SapoConfig(Section):
    """SAPO turns clipping into a smooth gate; higher temperatures close it faster."""

    positive: float = Field(1.0, gt=0)
    """τ where A > 0."""
    negative: float = Field(1.05, gt=0)
    """τ where A < 0."""


def sapo(tokens: TokenBatch, options: SapoConfig) -> Tensor:
    """Pass r through a gate: SAPO (arXiv 2511.20347).

    loss = −A · (4/τ) · σ(τ(r − 1)) with a τ for each sign of A. The derivative, −A · 4σ(1 − σ) · r,
    is that of the plain policy gradient at r = 1 and falls smoothly on both sides.
    """
    import torch

    tau_T = torch.where(tokens.advantage > 0, options.positive, options.negative)
    return -tokens.advantage * 4 / tau_T * torch.sigmoid(tau_T * (tokens.ratio - 1))


class CeGppoConfig(Section):
    """CE-GPPO gives clipped tokens a gradient of fixed size; ``fixed`` has the bounds."""

    beta_low: float = Field(0.75, ge=0)
    """Gradient of tokens below the lower bound, in multiples of that bound."""
    beta_high: float = Field(1.0, ge=0)
    """Gradient of tokens above the upper bound, in multiples of that bound."""


def ce_gppo(
    tokens: TokenBatch, options: CeGppoConfig, fixed: FixedClipConfig, dual_clip: float | None
) -> Tensor:
    """Give clipped tokens a gradient of fixed size: CE-GPPO (arXiv 2509.20712).

    The weight is β_high · c_high where A > 0 and r > c_high, β_low · c_low where A < 0 and r <
    c_low, 0 where A < 0 and r is above the dual clip, else r.
    """
    ratio_T, is_negative_T = tokens.ratio, tokens.advantage < 0
    is_high_T = (tokens.advantage > 0) & (ratio_T > fixed.high)
    is_low_T = is_negative_T & (ratio_T < fixed.low)
    weight_T = ratio_T.masked_fill(is_high_T, options.beta_high * fixed.high)
    weight_T = weight_T.masked_fill(is_low_T, options.beta_low * fixed.low)
    if dual_clip is not None:
        weight_T = weight_T.masked_fill(is_negative_T & (ratio_T > dual_clip), 0.0)
    return _weighted(tokens, weight_T)


class AspoConfig(Section):
    """ASPO inverts the ratio of positive tokens; ``fixed`` has the bounds."""

    cap: float = Field(3.0, ge=1)
    """Largest weight: limits 1/r where A > 0, and r where A < 0."""


def aspo(tokens: TokenBatch, options: AspoConfig, fixed: FixedClipConfig) -> Tensor:
    """Invert the ratio of positive tokens: ASPO (arXiv 2510.06062).

    The weight is min(1/r, cap) where A > 0, and 0 where also r > c_high; min(r, cap) where A < 0,
    and 0 where also r < c_low. The release has wider bounds, 0.6 and 1.4, for the fifth of a
    response's tokens with the highest entropy; here all use those of ``fixed``.
    """
    ratio_T = tokens.ratio
    positive_T = (1 / ratio_T).clamp(max=options.cap).masked_fill(ratio_T > fixed.high, 0.0)
    negative_T = ratio_T.clamp(max=options.cap).masked_fill(ratio_T < fixed.low, 0.0)
    return _weighted(tokens, positive_T.where(tokens.advantage > 0, negative_T))


def topr(tokens: TokenBatch) -> Tensor:
    """Weight responses with a reward above 0 by 1, others by min(r, 1): TOPR (arXiv 2503.14286)."""
    return _weighted(tokens, tokens.ratio.clamp(max=1.0).masked_fill(tokens.reward > 0, 1.0))


class DppoTvConfig(Section):
    """DPPO leaves out tokens whose probability has moved too far."""

    delta: float = Field(0.15, gt=0, le=1)
    """How far the probability of a token may move with its advantage."""
    cap: float = Field(1e4, ge=1)
    """Largest weight r."""


def dppo_tv(tokens: TokenBatch, options: DppoTvConfig) -> Tensor:
    """Leave out tokens whose probability has moved too far: DPPO (arXiv 2602.04879).

    The weight is min(r, cap) where p − q ≤ δ (A > 0) or p − q ≥ −δ (A < 0), else 0. |p − q| is a
    lower bound of the total variation between the two policies at the token.
    """
    moved_T = tokens.logprob.exp() - tokens.behaviour_logprob.exp()
    moved_T = moved_T.where(tokens.advantage > 0, -moved_T)
    weight_T = tokens.ratio.clamp(max=options.cap)
    return _weighted(tokens, weight_T.masked_fill(moved_T > options.delta, 0.0))


class DcpoConfig(Section):
    """DCPO gives unlikely tokens wider bounds."""

    epsilon_low: float = Field(0.16, ge=0)
    """Width of the lower bound."""
    epsilon_high: float = Field(0.2, ge=0)
    """Width of the upper bound."""
    max_high: float = Field(10.0, ge=1)
    """Limit of the upper bound."""


@dataclass(frozen=True, slots=True)
class Dcpo(Clip):
    """PPO's loss with bounds that are wider for unlikely tokens: DCPO (arXiv 2509.02333).

    c_low = ½ + ½√max(1 − 4ε_low/q, 0) and c_high = ½ + ½√(1 + 4ε_high/q), at most ``max_high``;
    they solve |r − 1| · p = ε.
    """

    options: DcpoConfig
    dual_clip: float | None
    centers = False  # its bounds depend on q of the token

    def bounds(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return the bounds of every token, [T] each."""
        per_prob_T = 4 * (-tokens.behaviour_logprob).exp()
        low_T = 0.5 + 0.5 * (1 - self.options.epsilon_low * per_prob_T).clamp(min=0).sqrt()
        high_T = 0.5 + 0.5 * (1 + self.options.epsilon_high * per_prob_T).sqrt()
        return low_T, high_T.clamp(max=self.options.max_high)


def _of(
    function: Callable[..., Tensor],
    *options: object,
    weight: Callable[[Tensor], Tensor] | None = None,
) -> FunctionObjective:
    """Return the objective of one of the functions above; its options follow its tokens."""
    return FunctionObjective(
        lambda tokens: function(tokens, *options), trains_zero_advantage=False, weight=weight
    )


def _cispo(options: CispoConfig) -> FunctionObjective:
    return _of(cispo, options, weight=lambda ratio_TK: ratio_TK.clamp(options.low, options.high))


NAMED = {
    "reinforce": NamedObjective(
        lambda *_: _of(reinforce, weight=lambda ratio_TK: ratio_TK.new_ones(ratio_TK.shape)),
        centers=True,
    ),
    "nll": NamedObjective(lambda *_: FunctionObjective(nll, trains_zero_advantage=True)),
    "cispo": NamedObjective(lambda o, *_: _cispo(o), CispoConfig, centers=True),
    "sapo": NamedObjective(lambda o, *_: _of(sapo, o), SapoConfig),
    "ce_gppo": NamedObjective(
        lambda o, c: _of(ce_gppo, o, c.options(FixedClipConfig), c.dual_clip),
        CeGppoConfig,
        dual_clip=True,
    ),
    "aspo": NamedObjective(lambda o, c: _of(aspo, o, c.options(FixedClipConfig)), AspoConfig),
    "topr": NamedObjective(lambda *_: _of(topr)),
    "dppo_tv": NamedObjective(lambda o, *_: _of(dppo_tv, o), DppoTvConfig),
    "dcpo": NamedObjective(lambda o, c: Dcpo(o, c.dual_clip), DcpoConfig, dual_clip=True),
}
