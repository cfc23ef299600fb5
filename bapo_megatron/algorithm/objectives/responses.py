"""Objectives that need a sum over each response: GSPO, GMPO and OPSM.

The sums are exact, so that context-parallel ranks, chunks and micro-batches all see the same. A
response without a token that trains is in no update. The published losses of GSPO and GMPO need
``loss_aggregation: sequence_mean`` (docs/objectives.md). Notation: x = ℓ − μ.
Shape legend: T = response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from bapo_megatron.algorithm.objective import LOG_RATIO_LIMIT, NamedObjective, Objective, TokenBatch
from bapo_megatron.algorithm.objectives.clip import (
    FixedClip,
    FixedClipConfig,
    clipped_loss,
    clipped_tokens,
)
from bapo_megatron.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from bapo_megatron.config.schema import AlgorithmConfig


def _response_mean(tokens: TokenBatch) -> Tensor:
    """Mean of the statistic over the token's response, [T]."""
    assert tokens.response_sums is not None, "responses are summed before the loss"
    return tokens.response_sums / tokens.response_tokens.clamp(min=1)


def _geometric_mean(tokens: TokenBatch, log_T: Tensor) -> Tensor:
    """Return s = exp(response's mean), [T], with the derivative s · ∂``log_T``."""
    mean_T = _response_mean(tokens).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (mean_T + log_T - log_T.detach()).exp()


class GspoConfig(Section):
    """Bounds of GSPO's s, the geometric mean of r over a response."""

    low: float = Field(0.9997, ge=0, le=1)
    """Lower bound."""
    high: float = Field(1.0004, ge=1)
    """Upper bound."""


@dataclass(frozen=True, slots=True)
class Gspo(Objective):
    """PPO's loss of s = exp(mean x), the same for all tokens of a response (arXiv 2507.18071).

    s has the derivative of the token's own log π: ∂loss/∂ℓ = −A · s where s is not clipped.
    """

    options: GspoConfig
    dual_clip: float | None = None
    needs = "response"
    trains_zero_advantage = False

    def statistics(self, tokens: TokenBatch) -> Tensor:
        """Return x, [T]."""
        return tokens.logprob - tokens.behaviour_logprob

    def loss(self, tokens: TokenBatch) -> Tensor:
        """Return −min(s A, clip(s) A), [T]."""
        return clipped_loss(*self._clip(tokens))

    def report(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """Return which tokens belong to clipped responses, [T] bool each."""
        return clipped_tokens(*self._clip(tokens))

    def _clip(
        self, tokens: TokenBatch
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], float | None]:
        s_T = _geometric_mean(tokens, tokens.logprob)
        low, high = (s_T.new_full((), bound) for bound in (self.options.low, self.options.high))
        return s_T, tokens.advantage, (low, high), self.dual_clip


class GmpoConfig(Section):
    """Bounds of ℓ − μ of each token in GMPO's geometric mean."""

    log_low: float = Field(-0.4, le=0)
    """Lower bound where A < 0."""
    log_high: float = Field(0.4, ge=0)
    """Upper bound where A > 0."""


@dataclass(frozen=True, slots=True)
class Gmpo(Objective):
    """The geometric mean of clipped ratios (arXiv 2507.20673).

    loss = −A · s with s = exp(mean of clipped x), where x is limited from above where A > 0 and
    from below where A < 0. ∂loss/∂ℓ = −A · s where x of the token is not clipped.
    """

    options: GmpoConfig
    needs = "response"
    trains_zero_advantage = False

    def statistics(self, tokens: TokenBatch) -> Tensor:
        """Return the clipped x, [T]."""
        x_T = tokens.logprob - tokens.behaviour_logprob
        low_T, high_T = x_T.clamp(min=self.options.log_low), x_T.clamp(max=self.options.log_high)
        return high_T.where(tokens.advantage > 0, low_T)

    def loss(self, tokens: TokenBatch) -> Tensor:
        """Return −A s, [T]."""
        return -tokens.advantage * _geometric_mean(tokens, self.statistics(tokens))

    def report(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """Return which tokens are clipped, [T] bool each."""
        x_T = tokens.logprob - tokens.behaviour_logprob
        return {
            "clip/fraction_high": (tokens.advantage > 0) & (x_T > self.options.log_high),
            "clip/fraction_low": (tokens.advantage < 0) & (x_T < self.options.log_low),
        }


class OpsmConfig(Section):
    """OPSM leaves out negative responses that are off-policy; ``fixed`` has the bounds of r."""

    delta: float = Field(1e-4, ge=0)
    """Largest mean of μ − ℓ of a negative response that trains."""


@dataclass(frozen=True, slots=True)
class Opsm(FixedClip):
    """PPO's loss without negative responses that are off-policy (DeepSeek-V3.2, arXiv 2512.02556).

    The loss of a response is 0 where A < 0 and mean(−x) > δ. Its tokens stay in the denominators.
    """

    delta: float = 1e-4
    """δ."""
    needs = "response"

    def statistics(self, tokens: TokenBatch) -> Tensor:
        """Return −x, [T]."""
        return tokens.behaviour_logprob - tokens.logprob

    def loss(self, tokens: TokenBatch) -> Tensor:
        """Return the clipped loss, 0 for responses left out, [T]."""
        return FixedClip.loss(self, tokens).masked_fill(self._is_left_out(tokens), 0.0)

    def report(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """Return which tokens are left out, and which of the others are clipped, [T] bool."""
        out_T = self._is_left_out(tokens)
        clipped = FixedClip.report(self, tokens)
        clipped = {name: clipped_T & ~out_T for name, clipped_T in clipped.items()}
        return {"opsm/masked_share": out_T, **clipped}

    def _is_left_out(self, tokens: TokenBatch) -> Tensor:
        return (tokens.advantage < 0) & (_response_mean(tokens) > self.delta)


def _opsm(options: OpsmConfig, algorithm: AlgorithmConfig) -> Opsm:
    fixed = algorithm.options(FixedClipConfig)
    return Opsm(fixed.low, fixed.high, algorithm.dual_clip, options.delta)


NAMED = {
    "gspo": NamedObjective(lambda o, c: Gspo(o, c.dual_clip), GspoConfig, dual_clip=True),
    "gmpo": NamedObjective(lambda o, c: Gmpo(o), GmpoConfig),
    "opsm": NamedObjective(_opsm, OpsmConfig, dual_clip=True),
}
