"""What the ranks of test_step_reduction.py do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.config.schema import AlgorithmConfig
from bapo_megatron.ops.contributions import BOUNDS_FIELDS, REFUSED
from bapo_megatron.ops.logprob import TokenLogprobs
from bapo_megatron.trainer.measurement import find_faults, read_measurements, reduce_reports
from bapo_megatron.trainer.records import Numbers, TokenReport
from tests.distributed_launch import joined


class _Stage:
    """What the reduction asks of a ``LossStage``."""

    def __init__(self) -> None:
        loaded = load_objective(AlgorithmConfig())
        self.objective = loaded.objective
        self.decision_size = loaded.decision_size
        self.numbers = Numbers(loaded.report_names, corrects=False)


STAGE: Any = _Stage()


def reduce_on_two_stages(
    nonfinite_tokens: float, refused: bool, collected: tuple[int, int] = (0, 0)
) -> dict[str, Any]:
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
        found = torch.tensor(collected) if staged.is_last_stage else None
        return _read(reduce_reports(reports, found, None, STAGE, staged, num_decisions=2))


def reduce_over_data_ranks() -> dict[str, Any]:
    """Two data-parallel ranks with one micro-batch each, and one search for both."""
    with joined() as groups:
        reports = [_report(1.0 + groups.rank, 0.0, False)]
        found = torch.tensor([groups.rank + 1, 2])
        return _read(reduce_reports(reports, found, None, STAGE, groups, num_decisions=1))


def _read(measurement: Any) -> dict[str, Any]:
    [measured] = read_measurements([measurement], STAGE)
    return {
        "sums": measured.sums,
        "maxima": measured.maxima,
        "decisions": [
            dict(zip(BOUNDS_FIELDS, row, strict=True)) for row in measurement.decisions.tolist()
        ],
        "faults": find_faults(measurement, STAGE).tolist(),
    }


def _report(value: float, nonfinite_tokens: float, refused: bool) -> TokenReport:
    names = STAGE.numbers.sum_names
    sums = torch.full((len(names),), value, dtype=torch.float64)
    sums[names.index("nonfinite_tokens")] = nonfinite_tokens
    sums[names.index("nonfinite_losses")] = 0
    bounds = torch.zeros(len(BOUNDS_FIELDS), dtype=torch.float64)
    bounds[BOUNDS_FIELDS.index("low")] = value
    bounds[BOUNDS_FIELDS.index("exit")] = REFUSED if refused else 0
    return TokenReport(
        sums=sums,
        maxima=torch.full((len(STAGE.numbers.max_names),), value, dtype=torch.float64),
        decision=bounds,
        policy=TokenLogprobs(torch.zeros(0), torch.zeros(0)),
    )
