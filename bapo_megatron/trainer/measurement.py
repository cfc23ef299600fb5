"""What one update measured: summed over ranks, told to all stages, read at the end of the step.

Shape legend: S = sums, M = maxima, K = decisions of the update, D = entries of a decision.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.distributed import ProcessGroups, reduce_over
from bapo_megatron.trainer.loss import LossStage
from bapo_megatron.trainer.records import TokenReport
from bapo_megatron.types import UpdateResult


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one update measured over all ranks, equal on all of them and still on the device."""

    sums: Tensor
    """[S] float64."""
    maxima: Tensor
    """[M] float64."""
    collected: Tensor
    """[2] float64: the faults of the collection pass (``Collected.faults``)."""
    decisions: Tensor
    """[K, D] float64."""
    remarks: Tensor
    """[2] float64, 1 where it is so: the decision is not the predicted one; the passes with and
    without gradients gave different statistics."""


def reduce_reports(
    reports: list[TokenReport],
    collected: Tensor | None,
    remarks: Tensor | None,
    stage: LossStage,
    groups: ProcessGroups,
    *,
    num_decisions: int,
) -> Measurement:
    """Add up the reports over micro-batches and data-parallel ranks, and tell all stages.

    A collective of all ranks: those of the last pipeline stage have a report of each micro-batch,
    the others [], but must know of faults as well.

    Args:
        reports: This rank's.
        collected: ``Collected.faults`` of this rank; None where there was no collection pass.
        remarks: ``Measurement.remarks``, equal on all ranks of the last stage; None: both 0.
        stage: Names what the reports hold.
        groups: This rank's groups.
        num_decisions: K; with 1 all reports hold the same decision, else each has its own.
    """
    num_sums, num_maxima = len(stage.numbers.sum_names), len(stage.numbers.max_names)
    shapes = ((num_sums,), (num_maxima,), (2,), (num_decisions, stage.decision_size), (2,))
    sizes = [math.prod(shape) for shape in shapes]
    if groups.is_last_stage:
        sums = torch.stack([report.sums for report in reports]).sum(dim=0)
        maxima = torch.stack([report.maxima for report in reports]).amax(dim=0)
        found = torch.zeros(2, dtype=torch.float64, device=groups.device)
        if collected is not None:
            found += collected
        counted = torch.cat([sums, found])
        reduce_over(groups.data, counted)
        reduce_over(groups.data, maxima, dist.ReduceOp.MAX)
        decisions = torch.stack([report.decision for report in reports[:num_decisions]])
        noted = torch.zeros_like(found) if remarks is None else remarks.double()
        packed = torch.cat([counted[:-2], maxima, counted[-2:], decisions.flatten(), noted])
    else:
        packed = torch.empty(sum(sizes), dtype=torch.float64, device=groups.device)
    if groups.pipeline_size > 1:
        last = dist.get_global_rank(groups.pipeline, groups.pipeline_size - 1)
        dist.broadcast(packed, src=last, group=groups.pipeline)
    parts = torch.split_with_sizes(packed, sizes)
    return Measurement(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))


def find_faults(measurement: Measurement, stage: LossStage) -> Tensor:
    """Return counts that must be 0 before an optimizer step, [3] float64, on the device.

    Tokens and losses that are not finite, and refused decisions.
    """
    names = stage.numbers.sum_names
    in_loss = measurement.sums[names.index("nonfinite_tokens")]
    # A collection pass of its own saw other log-probs than the loss did.
    tokens = torch.maximum(in_loss, measurement.collected[0])
    losses = measurement.sums[names.index("nonfinite_losses")] + measurement.collected[1]
    refused = torch.zeros_like(losses)
    for decision in measurement.decisions:
        is_refused = stage.objective.refuses(decision) if len(decision) else None
        if is_refused is not None:
            refused = refused + is_refused
    return torch.stack([tokens, losses, refused])


def read_measurements(measurements: list[Measurement], stage: LossStage) -> list[UpdateResult]:
    """Bring measurements to the host, all in one copy."""
    if not measurements:
        return []
    flat = [torch.cat([m.sums, m.maxima, m.decisions.flatten()]) for m in measurements]
    values = iter(torch.cat(flat).tolist())
    results = []
    for measurement in measurements:
        sums = {name: next(values) for name in stage.numbers.sum_names}
        maxima = {name: next(values) for name in stage.numbers.max_names}
        num_decisions, size = measurement.decisions.shape
        decisions = tuple(
            dict(stage.objective.report_decision([next(values) for _ in range(size)]))
            for _ in range(num_decisions)
        )
        results.append(UpdateResult(sums, maxima, decisions, grad_norm=0.0, skipped=False))
    return results
