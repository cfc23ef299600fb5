"""Clip rules: where the bounds come from and what a token contributes within them.

One rule is one small class with two methods of substance: ``bounds`` says which importance ratios
are allowed in this update, ``surrogate`` says what each token contributes. ``new_table`` tells the
trainer whether the rule must see all tokens first. To add a rule, write a class here and name it in
``make_clip_rule``.

Shape legend: T = response tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bapo_megatron.config.schema import AlgorithmConfig, BapoConfig, FixedClipConfig
from bapo_megatron.ops.contributions import ContributionTable, search_bounds
from bapo_megatron.types import ClipBounds


class Surrogate(NamedTuple):
    """What each token contributes, and which limit held it, if any."""

    value_T: Tensor
    """[T] the clipped r·A; its gradient is A·∂r where no limit acts, else 0."""
    high_T: Tensor
    """[T] bool: A > 0 and r above the upper bound."""
    low_T: Tensor
    """[T] bool: A < 0 and r below the lower bound."""
    dual_T: Tensor
    """[T] bool: A < 0 and r above the dual clip."""


class ClipRule(Protocol):
    """How far the policy may move away from the behaviour policy in one update."""

    def new_table(self) -> ContributionTable | None:
        """Return an empty table that ``bounds`` needs filled and summed over ranks, or None."""
        ...

    def bounds(self, table: ContributionTable | None) -> ClipBounds:
        """Choose the bounds, from the summed table where the rule asked for one."""
        ...

    def surrogate(self, ratio_T: Tensor, advantage_T: Tensor, bounds: ClipBounds) -> Surrogate:
        """Return each token's contribution, differentiable in ``ratio_T`` [T]."""
        ...


def clipped_surrogate(
    ratio_T: Tensor, advantage_T: Tensor, bounds: ClipBounds, dual_clip: float | None
) -> Surrogate:
    """Compute min(r·A, clip(r, c_low, c_high)·A), from below limited to dual_clip·A where A < 0.

    For A > 0 this is A·min(r, c_high); for A < 0 it is A·clamp(r, c_low, dual_clip). Written as
    one clamp whose limits depend on the sign of A, it passes the gradient at r equal to a limit.

    Args:
        ratio_T: [T] importance ratios, > 0.
        advantage_T: [T] advantages.
        bounds: The allowed importance ratios.
        dual_clip: Upper limit of r for negative advantages, or None.

    Returns:
        The contributions and which limit held each token.
    """
    dual = math.inf if dual_clip is None else dual_clip
    negative_T = advantage_T < 0
    positive_T = advantage_T > 0
    floor_T = torch.where(negative_T, bounds.low, 0.0).to(ratio_T.dtype)
    ceiling_T = torch.where(negative_T, dual, bounds.high).to(ratio_T.dtype)
    return Surrogate(
        value_T=advantage_T * torch.clamp(ratio_T, floor_T, ceiling_T),
        high_T=positive_T & (ratio_T > ceiling_T),
        low_T=negative_T & (ratio_T < floor_T),
        dual_T=negative_T & (ratio_T > ceiling_T),
    )


@dataclass(frozen=True, slots=True)
class BapoClip:
    """Bounds searched so that positive tokens hold the target share (BAPO, Algorithm 1)."""

    config: BapoConfig
    dual_clip: float | None = None

    def new_table(self) -> ContributionTable | None:
        """Return an empty contribution table."""
        return ContributionTable(self.config, self.dual_clip)

    def bounds(self, table: ContributionTable | None) -> ClipBounds:
        """Search the bounds in a table that was summed over all ranks."""
        if table is None:
            raise ValueError("clip: bapo needs a contribution table; take one from new_table()")
        return search_bounds(table, self.config)

    def surrogate(self, ratio_T: Tensor, advantage_T: Tensor, bounds: ClipBounds) -> Surrogate:
        """See ``clipped_surrogate``."""
        return clipped_surrogate(ratio_T, advantage_T, bounds, self.dual_clip)


@dataclass(frozen=True, slots=True)
class FixedClip:
    """Constant bounds: [0.8, 1.2] is GRPO and PPO, [0.8, 1.28] is clip-higher."""

    config: FixedClipConfig
    dual_clip: float | None = None

    def new_table(self) -> ContributionTable | None:
        """Return None: nothing is searched."""
        return None

    def bounds(self, table: ContributionTable | None) -> ClipBounds:
        """Return the configured bounds."""
        return _constant_bounds(self.config.low, self.config.high)

    def surrogate(self, ratio_T: Tensor, advantage_T: Tensor, bounds: ClipBounds) -> Surrogate:
        """See ``clipped_surrogate``."""
        return clipped_surrogate(ratio_T, advantage_T, bounds, self.dual_clip)


@dataclass(frozen=True, slots=True)
class NoClip:
    """No bounds: r·A for every token (a dual clip still holds where it is set)."""

    dual_clip: float | None = None

    def new_table(self) -> ContributionTable | None:
        """Return None: nothing is searched."""
        return None

    def bounds(self, table: ContributionTable | None) -> ClipBounds:
        """Return [0, inf]."""
        return _constant_bounds(0.0, math.inf)

    def surrogate(self, ratio_T: Tensor, advantage_T: Tensor, bounds: ClipBounds) -> Surrogate:
        """See ``clipped_surrogate``."""
        return clipped_surrogate(ratio_T, advantage_T, bounds, self.dual_clip)


def make_clip_rule(config: AlgorithmConfig) -> ClipRule:
    """Return the clip rule that ``algorithm.clip`` names."""
    if config.clip == "bapo":
        return BapoClip(config.bapo, config.dual_clip)
    if config.clip == "fixed":
        return FixedClip(config.fixed, config.dual_clip)
    return NoClip(config.dual_clip)


def _constant_bounds(low: float, high: float) -> ClipBounds:
    return ClipBounds(
        low=low, high=high, positive_share_start=math.nan, positive_share=math.nan, exit="fixed"
    )
