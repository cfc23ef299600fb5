"""Advantages over the batch: REINFORCE++ (arXiv 2501.03262)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bapo_megatron.algorithm.advantages.group import grpo_no_std

if TYPE_CHECKING:
    from torch import Tensor

VARIANCE_EPSILON = 1e-8
"""Added to the variance."""


def _reinforce_pp(reward_PG: Tensor, length_PG: Tensor) -> Tensor:
    """R whitened over the batch as (R − m) / √(v + 1e-8).

    m is the mean and v the unbiased variance over all *tokens*; 0 where all values are equal.
    """
    num_tokens = float(length_PG.sum())
    if num_tokens < 2 or bool(reward_PG.amax() == reward_PG.amin()):
        return reward_PG.new_zeros(reward_PG.shape)
    mean = math.fsum((reward_PG * length_PG).flatten().tolist()) / num_tokens
    square_PG = (reward_PG - mean).square() * length_PG
    variance = math.fsum(square_PG.flatten().tolist()) / (num_tokens - 1)
    return (reward_PG - mean) / math.sqrt(variance + VARIANCE_EPSILON)


def _reinforce_pp_baseline(reward_PG: Tensor, length_PG: Tensor) -> Tensor:
    """The same of R − mean of the group."""
    return _reinforce_pp(grpo_no_std(reward_PG, length_PG), length_PG)


NAMED = {"reinforce_pp": _reinforce_pp, "reinforce_pp_baseline": _reinforce_pp_baseline}
