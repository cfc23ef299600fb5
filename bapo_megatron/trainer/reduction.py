"""From the reports of one update's micro-batches to what it measured over all ranks.

Shape legend: S = sums, M = maxima, K = decisions of the update, D = entries of a decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

    from bapo_megatron.distributed import ProcessGroups
    from bapo_megatron.trainer.loss_stage import LossStage, TokenReport

FAULTS = ("nonfinite_tokens", "nonfinite_losses", "refused_decisions")
"""Counts that must be 0 before an optimizer step."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one update measured over all ranks, equal on all of them and still on the device."""

    sums: Tensor
    """[S] float64."""
    maxima: Tensor
    """[M] float64."""
    collected: Tensor
    """[2] float64: the faults of the collection pass (``loss_stage.Collected``)."""
    decisions: Tensor
    """[K, D] float64."""

    def flatten(self) -> Tensor:
        """All of it, one after the other."""
        return torch.cat([self.sums, self.maxima, self.collected, self.decisions.flatten()])


def reduce_reports(
    reports: list[TokenReport],
    collected: Tensor | None,
    stage: LossStage,
    groups: ProcessGroups,
    *,
    num_decisions: int,
) -> Measurement:
    """Add up the reports over micro-batches and data-parallel ranks, and tell all stages.

    A collective of all ranks. Only those of the last pipeline stage have reports; the other stages
    must know of faults as well.

    Args:
        reports: One per micro-batch on ranks of the last stage, elsewhere [].
        collected: The faults that this rank found before the loss; None where there was no
            collection pass.
        stage: Names what the reports hold.
        groups: This rank's groups.
        num_decisions: K; with 1 all reports hold the same decision, else each has its own.
    """
    numbers = stage.numbers
    shapes = (
        (len(numbers.sum_names),),
        (len(numbers.max_names),),
        (2,),
        (num_decisions, stage.decision_size),
    )
    if groups.is_last_stage:
        sums = torch.stack([report.sums for report in reports]).sum(dim=0)
        maxima = torch.stack([report.maxima for report in reports]).amax(dim=0)
        found = torch.zeros(2, dtype=torch.float64, device=groups.device)
        if collected is not None:
            found += collected
        counted = torch.cat([sums, found])
        dist.all_reduce(counted, group=groups.data)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=groups.data)
        decisions = torch.stack([report.decision for report in reports[:num_decisions]])
        packed = torch.cat([counted[:-2], maxima, counted[-2:], decisions.flatten()])
    else:
        size = sum(torch.Size(shape).numel() for shape in shapes)
        packed = torch.empty(size, dtype=torch.float64, device=groups.device)
    if groups.pipeline_size > 1:
        last = dist.get_global_rank(groups.pipeline, groups.pipeline_size - 1)
        dist.broadcast(packed, src=last, group=groups.pipeline)
    parts = torch.split_with_sizes(packed, [torch.Size(shape).numel() for shape in shapes])
    return Measurement(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))


def find_faults(measurement: Measurement, stage: LossStage) -> Tensor:
    """Return the counts of ``FAULTS`` of an update, [3] float64, on the device."""
    names = stage.numbers.sum_names
    in_loss = measurement.sums[names.index("nonfinite_tokens")]
    # The collection pass saw the log-probs of another pass than the loss where it came before it.
    tokens = torch.maximum(in_loss, measurement.collected[0])
    losses = measurement.sums[names.index("nonfinite_losses")] + measurement.collected[1]
    refused = torch.zeros_like(losses)
    for decision in measurement.decisions:
        is_refused = stage.objective.refuses(decision) if len(decision) else None
        if is_refused is not None:
            refused = refused + is_refused
    return torch.stack([tokens, losses, refused])


@dataclass(frozen=True, slots=True)
class Measured:
    """A ``Measurement`` on the host."""

    sums: dict[str, float]
    maxima: dict[str, float]
    decisions: tuple[tuple[float, ...], ...]
    """[K][D]."""


def read_measurements(measurements: list[Measurement], stage: LossStage) -> list[Measured]:
    """Bring measurements to the host, all in one copy."""
    if not measurements:
        return []
    values = iter(torch.cat([m.flatten() for m in measurements]).tolist())
    results = []
    for measurement in measurements:
        sums = {name: next(values) for name in stage.numbers.sum_names}
        maxima = {name: next(values) for name in stage.numbers.max_names}
        for _ in measurement.collected:  # faults, not numbers
            next(values)
        num_decisions, size = measurement.decisions.shape
        decisions = tuple(tuple(next(values) for _ in range(size)) for _ in range(num_decisions))
        results.append(Measured(sums, maxima, decisions))
    return results
