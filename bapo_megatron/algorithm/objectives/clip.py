"""Clipping of the importance ratio: GRPO and PPO, clip-higher, or no clip at all.

    loss = −A · min(r, c_high)          where A > 0
           −A · clamp(r, c_low, dual)   where A < 0

which is PPO's −min(r A, clip(r, c_low, c_high) A), with a dual clip where A < 0. The gradient
passes where r equals a limit. Shape legend: T = response tokens.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from bapo_megatron.algorithm.objective import NamedObjective, Objective, TokenBatch
from bapo_megatron.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor


def clipped_loss(
    ratio_T: Tensor, advantage_T: Tensor, bounds: tuple[Tensor, Tensor], dual_clip: float | None
) -> Tensor:
    """Return the loss above, [T]; ``bounds`` is (c_low, c_high), [] or [T] each."""
    import torch

    floor_T, ceiling_T = _limits(advantage_T, bounds, dual_clip)
    # Not clamp alone: since torch 2.14 its derivative at a limit is a half.
    is_inside_T = (ratio_T >= floor_T) & (ratio_T <= ceiling_T)
    limited_T = torch.where(is_inside_T, ratio_T, ratio_T.detach().clamp(floor_T, ceiling_T))
    return -advantage_T * limited_T


def _limits(
    advantage_T: Tensor, bounds: tuple[Tensor, Tensor], dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return the limits of r, by the sign of A."""
    import torch

    low, high = bounds
    is_negative_T = advantage_T < 0
    dual = math.inf if dual_clip is None else dual_clip
    return torch.where(is_negative_T, low, 0.0), torch.where(is_negative_T, dual, high)


def clipped_tokens(
    ratio_T: Tensor, advantage_T: Tensor, bounds: tuple[Tensor, Tensor], dual_clip: float | None
) -> dict[str, Tensor]:
    """Return which tokens ``clipped_loss`` clips, [T] bool by metric."""
    low, high = bounds
    is_negative_T = advantage_T < 0
    dual = math.inf if dual_clip is None else dual_clip
    return {
        "clip/fraction_high": (advantage_T > 0) & (ratio_T > high),
        "clip/fraction_low": is_negative_T & (ratio_T < low),
        "clip/fraction_dual": is_negative_T & (ratio_T > dual),
    }


def bound_metrics(low: float, high: float) -> dict[str, float]:
    """Return the bounds of a decision by metric."""
    return {"clip/low": low, "clip/high": high}


class Clip(Objective):
    """The clipped loss; subclasses say where ``bounds`` come from."""

    trains_zero_advantage = False
    centers = True
    dual_clip: float | None
    """Upper limit of r where A < 0; None: no limit."""

    @abstractmethod
    def bounds(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return c_low and c_high, [] or [T], in the tokens' dtype and on their device."""

    def loss(self, tokens: TokenBatch) -> Tensor:
        """Return the clipped loss of each token, [T]."""
        return clipped_loss(tokens.ratio, tokens.advantage, self.bounds(tokens), self.dual_clip)

    def weights(self, tokens: TokenBatch, ratio_TK: Tensor) -> Tensor:
        """Return r where ``clipped_loss`` would not clip it, else 0, [T, K]."""
        low, high = (bound.to(ratio_TK.dtype) for bound in self.bounds(tokens))
        floor_T1, ceiling_T1 = _limits(tokens.advantage[:, None], (low, high), self.dual_clip)
        return ratio_TK * ((ratio_TK >= floor_T1) & (ratio_TK <= ceiling_T1))

    def report(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """Return which tokens are clipped, [T] bool each."""
        return clipped_tokens(tokens.ratio, tokens.advantage, self.bounds(tokens), self.dual_clip)


class FixedClipConfig(Section):
    """Bounds of ``clip``, ``ce_gppo``, ``aspo`` and ``opsm``.

    [0.8, 1.2] is GRPO and PPO, [0.8, 1.28] is clip-higher.
    """

    low: float = Field(0.8, ge=0, le=1)
    """Lower bound of the importance ratio."""
    high: float = Field(1.2, ge=1)
    """Upper bound of the importance ratio."""


@dataclass(frozen=True, slots=True)
class FixedClip(Clip):
    """The same bounds in every update; [0, inf] does not clip."""

    low: float
    """c_low."""
    high: float
    """c_high."""
    dual_clip: float | None = None

    def bounds(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return the configured bounds in the dtype of the ratios."""
        return tokens.ratio.new_full((), self.low), tokens.ratio.new_full((), self.high)

    def report_decision(self, decision: Sequence[float]) -> Mapping[str, float]:
        """Return the bounds, if there are any."""
        return {} if math.isinf(self.high) else bound_metrics(self.low, self.high)


NAMED = {
    "clip": NamedObjective(
        lambda o, c: FixedClip(o.low, o.high, c.dual_clip),
        FixedClipConfig,
        dual_clip=True,
        centers=True,
        key="fixed",
    ),
    "none": NamedObjective(lambda o, c: FixedClip(0.0, math.inf, c.dual_clip), dual_clip=True),
}
