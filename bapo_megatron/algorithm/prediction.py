"""What an update will decide, predicted before its log-probs are known (docs/algorithm.md).

The decisions of an objective that has ``decisive`` entries lie on a grid, so a prediction is either
right to the last bit or wrong. Nothing here waits for the device.

Shape legend: K = entries of a statistic, D = entries of a decision.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bapo_megatron.algorithm.objective import Objective

MEMORY_SHARE = 0.75
"""What an update keeps of its weight in ``recent_K`` with each later one
(docs/benchmarks/speculation_cpu_202611.md)."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The decision predicted for one update, equal on all ranks that hold the model's output."""

    decision: Tensor
    """[D] float64; NaN but for the decisive entries."""
    is_decisive: slice

    def misses(self, decision: Tensor) -> Tensor:
        """Return whether the decision is another one, a bool without dimensions."""
        return (self.decision[self.is_decisive] != decision[self.is_decisive]).any()


class Predictor:
    """Predicts the decisions of a run's updates in their order.

    Its history ends with the process: a resumed run may miss more at first, with equal results.
    """

    def __init__(self, objective: Objective) -> None:
        """Know nothing yet; ``objective.decisive`` is set."""
        self._objective = objective
        self._recent_K: Tensor | None = None

    def predict(self, known_K: Tensor) -> Prediction:
        """Predict from the statistics that the update's tokens have with ℓ = μ."""
        is_decisive = self._objective.decisive
        assert is_decisive is not None
        decision = self._objective.decide(self._objective.foresee(known_K, self._recent_K))
        return Prediction(hide_rest(decision, is_decisive), is_decisive)

    def learn(self, total_K: Tensor) -> None:
        """Take in the statistics that the update turned out to have."""
        if self._recent_K is not None:
            total_K = total_K + (self._recent_K.double() * MEMORY_SHARE).to(torch.int64)
        self._recent_K = total_K


def hide_rest(decision: Tensor, is_decisive: slice) -> Tensor:
    """Return a decision, [D], with NaN for the entries that are not decisive."""
    hidden = torch.full_like(decision, torch.nan)
    hidden[is_decisive] = decision[is_decisive]
    return hidden
