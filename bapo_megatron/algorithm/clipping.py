"""Clip rules: which importance ratios are allowed in an update.

Every rule chooses bounds [c_low, c_high]; what a token contributes within them is one formula for
all rules (``ops.policy_loss``). One rule is one small class: ``new_table`` says whether it must see
all tokens first, ``bounds`` chooses. To add a rule, write a class here and name it in
``make_clip_rule``.

Bounds are a float64 tensor with the entries of ``ops.contributions.BOUNDS_FIELDS``. They stay on
the device from the search to the loss, so that nothing waits for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from bapo_megatron.ops.contributions import ContributionTable, constant_bounds, search_bounds

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bapo_megatron.config.schema import AlgorithmConfig, BapoConfig, FixedClipConfig
    from bapo_megatron.ops.backend import Kernels


class ClipRule(Protocol):
    """How far the policy may move away from the behaviour policy in one update."""

    def new_table(self, kernels: Kernels) -> ContributionTable | None:
        """Return an empty table that ``bounds`` needs filled and summed over ranks, or None."""
        ...

    def bounds(self, table: ContributionTable | None) -> Tensor:
        """Choose the bounds, from the summed table where the rule asked for one."""
        ...


@dataclass(frozen=True, slots=True)
class BapoClip:
    """Bounds searched so that positive tokens hold the target share (BAPO, Algorithm 1)."""

    config: BapoConfig
    dual_clip: float | None
    device: torch.device

    def new_table(self, kernels: Kernels) -> ContributionTable | None:
        """Return an empty contribution table."""
        return ContributionTable(self.config, self.dual_clip, device=self.device, kernels=kernels)

    def bounds(self, table: ContributionTable | None) -> Tensor:
        """Search the bounds in a table that was summed over all ranks."""
        if table is None:
            raise ValueError("clip: bapo needs a contribution table; take one from new_table()")
        return search_bounds(table, self.config)


@dataclass(frozen=True, slots=True)
class ConstantClip:
    """The same bounds in every update: [0.8, 1.2] is GRPO and PPO, [0, inf] does not clip."""

    constant: Tensor

    def new_table(self, kernels: Kernels) -> ContributionTable | None:
        """Return None: nothing is searched."""
        del kernels
        return None

    def bounds(self, table: ContributionTable | None) -> Tensor:
        """Return the configured bounds."""
        del table
        return self.constant


def make_clip_rule(config: AlgorithmConfig, device: torch.device) -> ClipRule:
    """Return the clip rule that ``algorithm.clip`` names.

    Args:
        config: The algorithm section.
        device: Where log-probs are, and bounds will be.
    """
    if config.clip == "bapo":
        return BapoClip(config.bapo, config.dual_clip, device)
    if config.clip == "fixed":
        return _fixed(config.fixed, device)
    return ConstantClip(constant_bounds(0.0, math.inf, device))


def _fixed(config: FixedClipConfig, device: torch.device) -> ConstantClip:
    return ConstantClip(constant_bounds(config.low, config.high, device))
