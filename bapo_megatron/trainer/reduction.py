"""From the reports of one update's micro-batches to what it measured over all ranks.

Shape legend: K = searches of the update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from bapo_megatron.ops.contributions import BOUNDS_FIELDS, REFUSED, to_clip_bounds
from bapo_megatron.telemetry.metrics import MAX_PREFIX
from bapo_megatron.trainer.loss_stage import MAX_NAMES, SUM_NAMES

if TYPE_CHECKING:
    from torch import Tensor

    from bapo_megatron.distributed import ProcessGroups
    from bapo_megatron.trainer.loss_stage import TokenReport
    from bapo_megatron.types import ClipBounds

FAULTS = ("nonfinite_tokens", "refused_searches")
"""Counts that must be 0 before an optimizer step."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one update measured over all ranks, equal on all of them and still on the device."""

    sums: Tensor
    """[len(SUM_NAMES)] float64."""
    maxima: Tensor
    """[len(MAX_NAMES)] float64."""
    bounds: Tensor
    """[K, len(BOUNDS_FIELDS)] float64."""

    @property
    def faults(self) -> Tensor:
        """[len(FAULTS)] float64, on the device."""
        refused_K = self.bounds[:, BOUNDS_FIELDS.index("exit")] == REFUSED
        # The search saw the log-probs of another pass than the loss where it came before it.
        in_search = self.bounds[:, BOUNDS_FIELDS.index("nonfinite_tokens")].sum()
        in_loss = self.sums[SUM_NAMES.index("nonfinite_tokens")]
        return torch.stack([torch.maximum(in_loss, in_search), refused_K.sum(dtype=torch.float64)])


def reduce_reports(
    reports: list[TokenReport], num_searches: int, groups: ProcessGroups
) -> Measurement:
    """Add up the reports over micro-batches and data-parallel ranks, and tell all stages.

    A collective of all ranks. Only those of the last pipeline stage have reports; the other stages
    must know of faults as well.

    Args:
        reports: One per micro-batch on ranks of the last stage, elsewhere [].
        num_searches: K; with 1 all reports hold the same bounds, else each has its own.
        groups: This rank's groups.
    """
    shapes = ((len(SUM_NAMES),), (len(MAX_NAMES),), (num_searches, len(BOUNDS_FIELDS)))
    if groups.is_last_stage:
        sums = torch.stack([report.sums for report in reports]).sum(dim=0)
        maxima = torch.stack([report.maxima for report in reports]).amax(dim=0)
        dist.all_reduce(sums, group=groups.data)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=groups.data)
        bounds = torch.stack([report.bounds for report in reports[:num_searches]])
        packed = torch.cat([sums, maxima, bounds.flatten()])
    else:
        size = sum(torch.Size(shape).numel() for shape in shapes)
        packed = torch.empty(size, dtype=torch.float64, device=groups.device)
    if groups.pipeline_size > 1:
        last = dist.get_global_rank(groups.pipeline, groups.pipeline_size - 1)
        dist.broadcast(packed, src=last, group=groups.pipeline)
    parts = torch.split_with_sizes(packed, [torch.Size(shape).numel() for shape in shapes])
    return Measurement(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))


def read_measurements(
    measurements: list[Measurement],
) -> list[tuple[dict[str, float], tuple[ClipBounds, ...]]]:
    """Bring measurements to the host, all in one copy.

    Returns:
        For each, the sums and maxima by name, and the bounds of its searches.
    """
    if not measurements:
        return []
    flat = [torch.cat([m.sums, m.maxima, m.bounds.flatten()]) for m in measurements]
    values = iter(torch.cat(flat).tolist())
    names = [*SUM_NAMES, *(f"{MAX_PREFIX}{name}" for name in MAX_NAMES)]
    results = []
    for measurement in measurements:
        sums = {name: next(values) for name in names}
        bounds = tuple(
            to_clip_bounds([next(values) for _ in BOUNDS_FIELDS]) for _ in measurement.bounds
        )
        results.append((sums, bounds))
    return results
