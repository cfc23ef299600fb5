"""avg@k and pass@k of an evaluation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

RIGHT_REWARD = 1.0
"""A sample with at least this reward counts as right in pass@k."""


def avg_at_k(rewards: Sequence[Sequence[float]]) -> float:
    """Mean over prompts of the mean reward of each prompt's samples.

    Args:
        rewards: For each prompt the rewards of its samples; at least one of both.
    """
    means = [math.fsum(samples) / len(samples) for samples in rewards]
    return math.fsum(means) / len(means)


def pass_at_k(rewards: Sequence[Sequence[float]], k: int) -> float:
    """Mean over prompts of the probability that k of the prompt's samples hold a right one.

    Args:
        rewards: For each prompt the rewards of its n samples, n ≥ k.
        k: Number of samples drawn without replacement.

    Raises:
        ValueError: A prompt has fewer than k samples.
    """
    estimates = []
    for samples in rewards:
        num_right = sum(reward >= RIGHT_REWARD for reward in samples)
        estimates.append(pass_at_k_estimate(len(samples), num_right, k))
    return math.fsum(estimates) / len(estimates)


def pass_at_k_estimate(num_samples: int, num_right: int, k: int) -> float:
    """The unbiased estimate 1 − C(n − c, k) / C(n, k) (Chen et al., arXiv 2107.03374, Eq. 1).

    Raises:
        ValueError: k does not lie in 1 … n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(
            f"pass@k needs 1 <= k <= {num_samples} samples, got k = {k}; sample more, or lower k"
        )
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)
