"""What the ranks of test_reduction.py do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from bapo_megatron.ops.contributions import BOUNDS_FIELDS, REFUSED
from bapo_megatron.trainer.loss_stage import MAX_NAMES, SUM_NAMES, TokenReport
from bapo_megatron.trainer.reduction import read_measurements, reduce_reports
from tests.distributed_launch import joined


def reduce_on_two_stages(nonfinite_tokens: float, refused: bool) -> dict[str, Any]:
    """Rank 0 is the first pipeline stage and has no reports, rank 1 the last one."""
    with joined() as groups:
        data_groups = [dist.new_group([0]), dist.new_group([1])]
        staged = replace(
            groups,
            data=data_groups[groups.rank],
            pipeline=dist.new_group([0, 1]),
            pipeline_rank=groups.rank,
            pipeline_size=2,
        )
        reports = []
        if staged.is_last_stage:
            reports = [_report(1.0, nonfinite_tokens, False), _report(10.0, 0.0, refused)]
        measurement = reduce_reports(reports, 2, staged)
        [(sums, bounds)] = read_measurements([measurement])
        return {"sums": sums, "bounds": bounds, "faults": measurement.faults.tolist()}


def reduce_over_data_ranks() -> dict[str, Any]:
    """Two data-parallel ranks with one micro-batch each, and one search for both."""
    with joined() as groups:
        measurement = reduce_reports([_report(1.0 + groups.rank, 0.0, False)], 1, groups)
        [(sums, bounds)] = read_measurements([measurement])
        return {"sums": sums, "bounds": bounds, "faults": measurement.faults.tolist()}


def _report(value: float, nonfinite_tokens: float, refused: bool) -> TokenReport:
    sums = torch.full((len(SUM_NAMES),), value, dtype=torch.float64)
    sums[SUM_NAMES.index("nonfinite_tokens")] = nonfinite_tokens
    bounds = torch.zeros(len(BOUNDS_FIELDS), dtype=torch.float64)
    bounds[BOUNDS_FIELDS.index("low")] = value
    bounds[BOUNDS_FIELDS.index("exit")] = REFUSED if refused else 0
    return TokenReport(
        sums=sums,
        maxima=torch.full((len(MAX_NAMES),), value, dtype=torch.float64),
        bounds=bounds,
        logprob_T=torch.zeros(0),
    )
