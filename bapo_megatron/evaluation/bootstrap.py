"""Confidence intervals of means over problems, by resampling the problems.

Every estimate of an evaluation is a mean over its problems. A resample draws as many problems as
there are, with replacement, each with all its samples; the 95 % interval reaches from the 2.5th to
the 97.5th percentile of the means of all resamples. It is about problems like these: with the same
problems and new samples, results scatter less. docs/evaluation.md says how often it covers.

Shape legend: P = problems, M = estimates, B = resamples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

TAIL = 0.025
"""Share of the resamples beyond each end of an interval."""
_ROUNDING = 1e-12
"""A mean difference this small is 0."""
_CHUNK_ENTRIES = 1 << 20
"""Draws held at a time."""


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """The mean difference of two results on the same problems."""

    difference: float
    low: float
    high: float
    p_value: float
    """Two-sided: twice the smaller share of resamples, itself added to them, whose mean difference
    is at most 0, and at least 0; at most 1."""


def intervals(values_PM: np.ndarray, num_resamples: int, seed: int) -> np.ndarray:
    """The 95 % intervals of means over problems.

    Args:
        values_PM: [P, M] float64, each problem's estimates; all columns share the resamples.
        num_resamples: B.
        seed: Decides the resamples.

    Returns:
        [2, M]: low and high ends.
    """
    means_BM = np.concatenate(list(_resampled_means(values_PM, num_resamples, seed)))
    ends_2M: np.ndarray = np.quantile(means_BM, [TAIL, 1 - TAIL], axis=0)
    return ends_2M


def paired_difference(differences_P: np.ndarray, num_resamples: int, seed: int) -> PairedDifference:
    """Compare two results problem by problem.

    Args:
        differences_P: [P] float64, the second result minus the first.
        num_resamples: B; the smallest p-value is 2 / (B + 1).
        seed: Decides the resamples.
    """
    means_BM = np.concatenate(list(_resampled_means(differences_P[:, None], num_resamples, seed)))
    means_B = means_BM[:, 0]
    low, high = np.quantile(means_B, [TAIL, 1 - TAIL])
    beyond = min(int((means_B <= _ROUNDING).sum()), int((means_B >= -_ROUNDING).sum()))
    return PairedDifference(
        difference=float(differences_P.mean()),
        low=float(low),
        high=float(high),
        p_value=min(1.0, 2 * (beyond + 1) / (num_resamples + 1)),
    )


def _resampled_means(values_PM: np.ndarray, num_resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Means of all resamples, some rows [., M] at a time."""
    rng = np.random.default_rng(seed)
    num_problems = len(values_PM)
    rows = max(1, _CHUNK_ENTRIES // num_problems)
    equal_P = np.full(num_problems, 1 / num_problems)
    for start in range(0, num_resamples, rows):
        # How often each problem is drawn.
        counts = rng.multinomial(num_problems, equal_P, size=min(rows, num_resamples - start))
        yield counts @ values_PM / num_problems
