"""Advantages per response, from the rewards of its group or of the batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def _centred(reward_PG: Tensor, weight_PG: Tensor) -> Tensor:
    """R − weighted mean of the group; exactly 0 where all rewards of the group are equal."""
    weighted_P1 = (reward_PG * weight_PG).sum(dim=1, keepdim=True)
    centred_PG = reward_PG - weighted_P1 / weight_PG.sum(dim=1, keepdim=True)
    all_equal_P1 = reward_PG.amax(dim=1, keepdim=True) == reward_PG.amin(dim=1, keepdim=True)
    return centred_PG.masked_fill(all_equal_P1, 0.0)


def _grpo_no_std(reward_PG: Tensor, length_PG: Tensor) -> Tensor:
    """R − mean of the group (Dr. GRPO, arXiv 2503.20783)."""
    return _centred(reward_PG, length_PG.new_ones(length_PG.shape))


def _grpo(reward_PG: Tensor, length_PG: Tensor) -> Tensor:
    """(R − mean) / (std + 1e-6) of the group, with the unbiased standard deviation."""
    centred_PG, others = _grpo_no_std(reward_PG, length_PG), reward_PG.shape[1] - 1
    variance_P1 = centred_PG.square().sum(dim=1, keepdim=True) / others
    return centred_PG / (variance_P1.sqrt() + 1e-6)


def _rloo(reward_PG: Tensor, length_PG: Tensor) -> Tensor:
    """R − mean of the other G − 1 responses: (R − mean) · G / (G − 1)."""
    group_size = reward_PG.shape[1]
    return _grpo_no_std(reward_PG, length_PG) * (group_size / (group_size - 1))


def _opo(reward_PG: Tensor, length_PG: Tensor) -> Tensor:
    """R − mean of the group weighted by the responses' lengths (arXiv 2505.23585)."""
    return _centred(reward_PG, length_PG.clamp(min=1))


def _reinforce_pp(reward_PG: Tensor, length_PG: Tensor) -> Tensor:
    """R whitened over the batch (REINFORCE++, arXiv 2501.03262): (R − m) / √(v + 1e-8).

    m is the mean and v the unbiased variance over all *tokens*; 0 where all values are equal.
    """
    num_tokens = float(length_PG.sum())
    if num_tokens < 2 or bool(reward_PG.amax() == reward_PG.amin()):
        return reward_PG.new_zeros(reward_PG.shape)
    mean = math.fsum((reward_PG * length_PG).flatten().tolist()) / num_tokens
    square_PG = (reward_PG - mean).square() * length_PG
    variance = math.fsum(square_PG.flatten().tolist()) / (num_tokens - 1)
    return (reward_PG - mean) / math.sqrt(variance + 1e-8)


def _reinforce_pp_baseline(reward_PG: Tensor, length_PG: Tensor) -> Tensor:
    """The same of R − mean of the group."""
    return _reinforce_pp(_grpo_no_std(reward_PG, length_PG), length_PG)


def _none(reward_PG: Tensor, length_PG: Tensor) -> Tensor:
    """0: for objectives without advantages, and tokens whose advantage the teacher adds."""
    return reward_PG.new_zeros(reward_PG.shape)


NAMED = {
    "grpo": _grpo,
    "grpo_no_std": _grpo_no_std,
    "rloo": _rloo,
    "opo": _opo,
    "reinforce_pp": _reinforce_pp,
    "reinforce_pp_baseline": _reinforce_pp_baseline,
    "distill": _none,
    "none": _none,
}

SHIFTED = ("grpo_no_std", "rloo", "opo")
"""Those of the form R minus a baseline, which ``algorithm.baseline_shift`` raises."""
