"""The check before each optimizer step, and measurements, which are reduced once per training step.

Shape legend: S = sums, M = maxima, U = updates, E = decisions of an update, D = entries of a
decision.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.runtime.distributed import ProcessGroups, reduce_over
from bapo_megatron.trainer.loss import NUM_COUNTED, LossStage
from bapo_megatron.trainer.records import TokenReport
from bapo_megatron.types import UpdateResult

NUM_FAULTS = NUM_COUNTED + 1
"""Counts at the beginning of a verdict that must be 0 before an optimizer step: those of
``LossStage.add_up``, and refused decisions."""

_NUM_REMARKS = 2
"""What follows them, 1 where it is so: the decision is not the predicted one; the passes with and
without gradients gave different statistics."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one update measured on this rank, on the device; zeros before the last stage."""

    sums: Tensor
    """[S] float64."""
    maxima: Tensor
    """[M] float64."""
    decisions: Tensor
    """[E, D] float64, equal on the ranks of the last stage."""


def measure(
    reports: Sequence[TokenReport], stage: LossStage, groups: ProcessGroups, num_decisions: int
) -> Measurement:
    """Add up this rank's reports of an update; there are none before the last stage.

    With one decision all reports hold the same, else each has its own.
    """
    if not groups.is_last_stage:
        shape = (num_decisions, stage.decision_size)
        decisions = torch.zeros(shape, dtype=torch.float64, device=groups.device)
        return Measurement(*stage.numbers.zeros(groups.device), decisions)
    return Measurement(
        torch.stack([report.sums for report in reports]).sum(dim=0),
        torch.stack([report.maxima for report in reports]).amax(dim=0),
        torch.stack([report.decision for report in reports[:num_decisions]]),
    )


def judge(
    decisions: Tensor,
    faults: Tensor | None,
    remarks: Tensor | None,
    stage: LossStage,
    groups: ProcessGroups,
) -> Tensor:
    """Return the verdict of an update, ``NUM_FAULTS`` + 2 float64 on the device, on all ranks.

    A collective over the pipeline.

    Args:
        decisions: [E, D] of the update, on the last stage.
        faults: [4] int64 of ``LossStage.add_up``, given on the last stage.
        remarks: [2] bool; None: neither holds.
        stage: Knows the objective, which may refuse a decision.
        groups: This rank's groups.
    """
    verdict = torch.zeros(NUM_FAULTS + _NUM_REMARKS, dtype=torch.float64, device=groups.device)
    if groups.is_last_stage:
        assert faults is not None, "the last stage counts them"
        verdict[:NUM_COUNTED] = faults
        for decision in decisions if stage.decision_size else ():
            is_refused = stage.objective.refuses(decision)
            if is_refused is not None:
                verdict[NUM_COUNTED] += is_refused
        if remarks is not None:
            verdict[NUM_FAULTS:] = remarks
    _broadcast_from_last_stage(verdict, groups)
    return verdict


def read_measurements(
    measurements: Sequence[Measurement], stage: LossStage, groups: ProcessGroups
) -> list[UpdateResult]:
    """Reduce the measurements of a step over data-parallel ranks and copy them to the host at once.

    A collective of all ranks: two all-reduces on the last stage, and one broadcast over the
    pipeline.
    """
    if not measurements:
        return []
    sums_US = torch.stack([measurement.sums for measurement in measurements])
    maxima_UM = torch.stack([measurement.maxima for measurement in measurements])
    if groups.is_last_stage:
        reduce_over(groups.data, sums_US)
        reduce_over(groups.data, maxima_UM, dist.ReduceOp.MAX)
    decisions = [measurement.decisions.flatten() for measurement in measurements]
    packed = torch.cat([sums_US.flatten(), maxima_UM.flatten(), *decisions])
    _broadcast_from_last_stage(packed, groups)
    values = iter(packed.tolist())
    sums = [{name: next(values) for name in stage.numbers.sum_names} for _ in measurements]
    maxima = [{name: next(values) for name in stage.numbers.max_names} for _ in measurements]
    results = []
    for number, measurement in enumerate(measurements):
        num_decisions, size = measurement.decisions.shape
        found = tuple(
            dict(stage.objective.report_decision([next(values) for _ in range(size)]))
            for _ in range(num_decisions)
        )
        own = sums[number], maxima[number]
        results.append(UpdateResult(*own, found, grad_norm=0.0, skipped=False))
    return results


def _broadcast_from_last_stage(values: Tensor, groups: ProcessGroups) -> None:
    """Give all pipeline stages the last one's values, in place."""
    if groups.pipeline_size > 1:
        last = dist.get_global_rank(groups.pipeline, groups.pipeline_size - 1)
        dist.broadcast(values, src=last, group=groups.pipeline)
