"""Intervals and tests for paired runs on several tasks with several seeds.

Tasks and seeds are both samples: an interval over seeds alone says nothing about other tasks. So
the bootstrap is hierarchical: it draws tasks, then seeds within each of them, with replacement.

Shape legend: I = tasks, S = seeds, N = draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DRAWS = 20_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with intervals of the hierarchical bootstrap."""

    mean: float
    low: float
    """Low end of the 95 % interval."""
    high: float
    low90: float
    """Low end of the 90 % interval, by which values are equivalent within a margin (TOST)."""
    high90: float
    p_value: float
    """Two-sided, of a mean of 0; at least 1/draws."""

    def is_within(self, margin: float) -> bool:
        """Whether it is equivalent to 0 at the 5 % level."""
        return -margin < self.low90 and self.high90 < margin


def bootstrap_means(value_IS: NDArray[np.float64], seed: int = 0) -> NDArray[np.float64]:
    """Means of the hierarchical bootstrap, [N]."""
    tasks, seeds = value_IS.shape
    rng = np.random.default_rng(seed)
    task_NI = rng.integers(tasks, size=(_DRAWS, tasks))
    seed_NIS = rng.integers(seeds, size=(_DRAWS, tasks, seeds))
    drawn: NDArray[np.float64] = value_IS[task_NI[:, :, None], seed_NIS].mean(axis=(1, 2))
    return drawn


def estimate(value_IS: NDArray[np.float64]) -> Estimate:
    """The mean of runs, or of differences of runs that share task and seed."""
    drawn_N = bootstrap_means(value_IS)
    low, low90, high90, high = np.quantile(drawn_N, (0.025, 0.05, 0.95, 0.975)).tolist()
    tail = min((drawn_N <= 0).mean(), (drawn_N >= 0).mean())
    p_value = min(1.0, 2 * max(tail, 1 / _DRAWS))
    return Estimate(float(value_IS.mean()), low, high, low90, high90, float(p_value))
