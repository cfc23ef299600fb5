"""Fixed clips of the importance ratio: GRPO and PPO, clip-higher, or no clip at all.

    loss = −A · min(r, c_high)          where A > 0
           −A · clamp(r, c_low, dual)   where A < 0

which is PPO's −min(r A, clip(r, c_low, c_high) A), with a dual clip where A < 0. The derivative
passes where r equals a limit. Shape legend: T = response tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bapo_megatron.algorithm.objective import Objective

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from bapo_megatron.algorithm.objective import TokenBatch


def clipped_loss(tokens: TokenBatch, low: Tensor, high: Tensor, dual_clip: float | None) -> Tensor:
    """Return the clipped loss of each token, [T].

    Args:
        tokens: The tokens.
        low: c_low, no dimensions, in the tokens' dtype and on their device.
        high: c_high, likewise.
        dual_clip: Upper limit of r where A < 0; None: no limit.
    """
    is_negative_T = tokens.advantage < 0
    floor_T = torch.where(is_negative_T, low, 0.0)
    ceiling_T = torch.where(is_negative_T, math.inf if dual_clip is None else dual_clip, high)
    return -tokens.advantage * tokens.ratio.clamp(floor_T, ceiling_T)


def clipped_shares(
    tokens: TokenBatch, low: Tensor, high: Tensor, dual_clip: float | None
) -> dict[str, Tensor]:
    """Return which tokens a limit holds, [T] bool each, by metric name; arguments as above."""
    is_negative_T = tokens.advantage < 0
    dual_T = torch.zeros_like(is_negative_T)
    if dual_clip is not None:
        dual_T = is_negative_T & (tokens.ratio > dual_clip)
    return {
        "clip/fraction_high": (tokens.advantage > 0) & (tokens.ratio > high),
        "clip/fraction_low": is_negative_T & (tokens.ratio < low),
        "clip/fraction_dual": dual_T,
    }


@dataclass(frozen=True, slots=True)
class FixedClip(Objective):
    """The same bounds in every update: [0.8, 1.2] is GRPO and PPO, [0, inf] does not clip."""

    low: float
    """c_low."""
    high: float
    """c_high."""
    dual_clip: float | None = None
    """Upper limit of r where A < 0; None: no limit."""

    def loss(self, tokens: TokenBatch) -> Tensor:
        """See ``clipped_loss``."""
        return clipped_loss(tokens, *self.bounds(tokens), self.dual_clip)

    def bounds(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return the configured bounds, in the dtype that they are compared in."""
        return tokens.ratio.new_full((), self.low), tokens.ratio.new_full((), self.high)

    def report(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """See ``clipped_shares``."""
        return clipped_shares(tokens, *self.bounds(tokens), self.dual_clip)

    def report_decision(self, decision: Sequence[float]) -> Mapping[str, float]:
        """Return the bounds, under the names of those that are searched."""
        del decision
        if math.isinf(self.high):
            return {}
        return {"bapo/clip_low": self.low, "bapo/clip_high": self.high}
