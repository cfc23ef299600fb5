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


def predict(objective: Objective, known_K: Tensor, recent_K: Tensor | None) -> Tensor:
    """Predict an update's decision from the statistics of its tokens at ℓ = μ.

    ``recent_K`` is from ``remember``; None before the first update. It is not saved: a resumed run
    may miss more at first, with equal results.

    Returns:
        [D] float64, NaN except in ``objective.decisive``, which must be set; equal on all ranks
        that hold the model's output.
    """
    assert objective.decisive is not None
    decision = objective.decide(objective.foresee(known_K, recent_K))
    return hide_rest(decision, objective.decisive)


def remember(recent_K: Tensor | None, total_K: Tensor) -> Tensor:
    """Add the statistics that an update turned out to have to the decaying sum of earlier ones."""
    if recent_K is None:
        return total_K
    return total_K + (recent_K.double() * DECAY).to(torch.int64)


def hide_rest(decision: Tensor, decisive: slice) -> Tensor:
    """Return a decision, [D], with NaN in the entries that are not decisive."""
    hidden = torch.full_like(decision, torch.nan)
    hidden[decisive] = decision[decisive]
    return hidden
