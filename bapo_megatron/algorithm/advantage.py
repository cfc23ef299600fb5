"""Group-relative advantages: how much better one response is than its siblings.

Shape legend: P = prompts (groups), G = responses per prompt.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

AdvantageKind = Literal["grpo", "grpo_no_std", "rloo"]

STD_EPSILON = 1e-6
"""Added to the standard deviation of ``grpo``."""


def group_advantages(reward_PG: Tensor, kind: AdvantageKind) -> Tensor:
    """Compute the advantage of every response relative to its group.

    - ``grpo``: (R − mean) / (std + 1e-6), with the unbiased standard deviation;
    - ``grpo_no_std``: R − mean (Dr. GRPO);
    - ``rloo``: R − mean of the other G − 1 responses = (R − mean) · G / (G − 1).

    A group whose rewards are all equal gets exactly 0, so that it counts as having no gradient.

    Args:
        reward_PG: [P, G] rewards.
        kind: Which estimator.

    Returns:
        [P, G] float32 advantages; formed in float64 and rounded once.

    Raises:
        ValueError: For a shape other than [P, G ≥ 2], a reward that is not finite, or an unknown
            kind.
    """
    if reward_PG.dim() != 2 or reward_PG.shape[1] < 2:
        raise ValueError(
            "reward_PG must have shape [prompts, responses per prompt >= 2], got "
            f"{list(reward_PG.shape)}; group-relative advantages need siblings to compare with"
        )
    if not bool(torch.isfinite(reward_PG).all()):
        row, column = (int(i) for i in torch.nonzero(~torch.isfinite(reward_PG))[0])
        raise ValueError(
            f"reward_PG[{row}, {column}] is {float(reward_PG[row, column])}; rewards must be finite"
        )
    group_size = reward_PG.shape[1]
    exact_PG = reward_PG.to(torch.float64)
    centred_PG = exact_PG - exact_PG.mean(dim=1, keepdim=True)
    if kind == "grpo":
        variance_P1 = centred_PG.square().sum(dim=1, keepdim=True) / (group_size - 1)
        advantage_PG = centred_PG / (variance_P1.sqrt() + STD_EPSILON)
    elif kind == "grpo_no_std":
        advantage_PG = centred_PG
    elif kind == "rloo":
        advantage_PG = centred_PG * (group_size / (group_size - 1))
    else:
        raise ValueError(f"advantage must be grpo, grpo_no_std or rloo, got {kind!r}")
    all_equal_P1 = exact_PG.amax(dim=1, keepdim=True) == exact_PG.amin(dim=1, keepdim=True)
    return torch.where(all_equal_P1, 0.0, advantage_PG).to(torch.float32)
