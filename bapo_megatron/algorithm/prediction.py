"""Predicts an update's decision before its log-probs are known (docs/algorithm.md).

The decisions of an objective that has ``decisive`` entries lie on a grid, so a prediction is either
right to the last bit or wrong. Nothing here waits for the device.

Shape legend: K = entries of a statistic, D = entries of a decision.
"""

import torch
from torch import Tensor

from bapo_megatron.algorithm.objective import Objective

DECAY = 0.75
"""Factor on an update's weight in ``recent_K`` with each later update
(docs/benchmarks/speculation_cpu_202611.md)."""


class Predictor:
    """Predicts the decisions of a run's updates, in order.

    Its history is not saved: a resumed run may miss more at first, with equal results.
    """

    def __init__(self, objective: Objective) -> None:
        """Start without history; ``objective.decisive`` must be set."""
        self._objective = objective
        self._recent_K: Tensor | None = None

    def predict(self, known_K: Tensor) -> Tensor:
        """Predict from the statistics of the update's tokens at ℓ = μ.

        Returns:
            [D] float64, NaN except in the decisive entries; equal on all ranks that hold the
            model's output.
        """
        decisive = self._objective.decisive
        assert decisive is not None
        decision = self._objective.decide(self._objective.foresee(known_K, self._recent_K))
        return hide_rest(decision, decisive)

    def learn(self, total_K: Tensor) -> None:
        """Add the statistics that the update turned out to have."""
        if self._recent_K is not None:
            total_K = total_K + (self._recent_K.double() * DECAY).to(torch.int64)
        self._recent_K = total_K


def hide_rest(decision: Tensor, decisive: slice) -> Tensor:
    """Return a decision, [D], with NaN in the entries that are not decisive."""
    hidden = torch.full_like(decision, torch.nan)
    hidden[decisive] = decision[decisive]
    return hidden
