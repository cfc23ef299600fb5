"""Runs the loss pass on a predicted decision, and again on a miss (docs/algorithm.md).

A hit saves the forward-only pass, a miss costs a second loss pass. All counts here are equal on all
ranks, so that all decide alike.

The decisions of an objective that has ``decisive`` entries lie on a grid, so a prediction is either
right to the last bit or wrong. Making one does not wait for the device.

Shape legend: K = entries of a statistic, D = entries of a decision.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bapo_megatron.algorithm.objective import Objective, Speculate, hide_rest
from bapo_megatron.runtime.distributed import ProcessGroups, broadcast_bytes
from bapo_megatron.telemetry.console import say
from bapo_megatron.trainer.loss import LossInputs

if TYPE_CHECKING:
    from bapo_megatron.trainer.step import Attempt, Update

TRIAL_UPDATES = 2
"""Updates in the plain order with which ``auto`` begins, to time the two passes and compare their
log-probs."""

WINDOW = 32
"""Number of the newest predictions in the miss rate."""

DECAY = 0.75
"""Factor on an update's weight in ``recent_K`` with each later update
(docs/benchmarks/speculation_cpu_202611.md)."""


class Speculation:
    """Decides updates by collected statistics (plain order) or by predictions.

    It relies on predictions while that pays; ``auto`` begins with trials, which rely on nothing.
    If the log-probs of an update are known, a prediction saves nothing and is not made.
    """

    def __init__(self, mode: Speculate, objective: Objective, groups: ProcessGroups) -> None:
        self._mode, self._objective, self._groups = mode, objective, groups
        self._recent_K: Tensor | None = None
        self._missed: deque[bool] = deque(maxlen=WINDOW)
        self._trials_left = TRIAL_UPDATES if mode == "auto" else 0
        self._break_even = 1.0
        self._collect_s = self._decided_s = 0.0

    @property
    def predicts(self) -> bool:
        """Whether updates are predicted at all."""
        return self._mode != "never"

    @property
    def is_trial(self) -> bool:
        """Whether the next update belongs to the trial."""
        return self._trials_left > 0

    @property
    def relies(self) -> bool:
        """Whether the loss pass of the next update runs with the prediction.

        A forward-only pass that takes a fraction x of a loss pass pays for x misses per update.
        """
        if self._mode == "auto":
            misses_paid_for = self._break_even * len(self._missed)
            return not self.is_trial and sum(self._missed) < misses_paid_for
        return self._mode == "always"

    def decide(self, update: Update, collect: Callable[[Update], LossInputs]) -> LossInputs:
        """Return what the loss pass of an update runs with; a collective of all ranks.

        Predicted updates are collected as well, unless the prediction is relied on.
        """
        if not self.predicts or update.split.policy is not None:
            return collect(update)
        known_K, micro_batches = update.known_K, update.split.micro_batches
        prediction = None
        if known_K is not None:
            prediction = predict(self._objective, known_K, self._recent_K)
        if self.relies:
            return LossInputs(micro_batches, prediction, prediction=prediction, is_predicted=True)
        began_s = self._clock_s()
        inputs = collect(update)
        self._decided_s = self._clock_s()
        self._collect_s = self._decided_s - began_s
        return replace(inputs, prediction=prediction, is_trial=self.is_trial)

    def learn(self, update: Update, inputs: LossInputs, first: Attempt) -> dict[str, float]:
        """Count the prediction of an update and learn its statistics; return sums to report."""
        if not self.predicts or update.split.policy is not None:
            return {}
        missed, differs = (bool(flag) for flag in first.step.verdict[-2:])
        self._missed.append(missed)  # whether or not the update relied on the prediction
        if self.is_trial:
            loss_s = self._clock_s() - self._decided_s
            self.end_trial(self._collect_s, loss_s, differs=differs)
        if first.inputs.total is not None:
            self._recent_K = remember(self._recent_K, first.inputs.total)
        relied = float(inputs.is_predicted)
        return {"predictions": 1.0, "hits": float(not missed), "relied": relied}

    def end_trial(self, forward_only_s: float, loss_s: float, *, differs: bool) -> None:
        """Take rank 0's times of the two passes, and whether their statistics differ.

        A collective. The trial with the smallest share of forward-only time counts.
        """
        self._trials_left -= 1
        share_text = None if self._groups.rank else (forward_only_s / loss_s).hex().encode()
        share = float.fromhex(broadcast_bytes(share_text, self._groups).decode())
        self._break_even = min(self._break_even, share)
        if differs:
            self._mode, self._trials_left = "never", 0
            if self._groups.rank == 0:
                say(
                    "decisions are not predicted (speculate: auto): the passes with and without "
                    "gradients give different log-probs on this device (docs/algorithm.md)"
                )

    def _clock_s(self) -> float:
        """Return the time in seconds; in the trial, when the device has finished."""
        if self.is_trial and self._groups.device.type == "cuda":
            torch.cuda.synchronize(self._groups.device)
        return time.perf_counter()


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
