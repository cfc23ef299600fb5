"""What the ranks of test_step_reduction.py do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.config.schema import AlgorithmConfig
from bapo_megatron.distributed import ProcessGroups
from bapo_megatron.ops.contributions import BOUNDS_FIELDS, REFUSED
from bapo_megatron.ops.logprob import TokenLogprobs
from bapo_megatron.trainer.loss import LossStage
from bapo_megatron.trainer.measurement import NUM_FAULTS, judge, measure, read_measurements
from bapo_megatron.trainer.records import Numbers, TokenReport
from tests.distributed_launch import joined


class _Stage:
    """What the reduction asks of a ``LossStage``."""

    def __init__(self) -> None:
        loaded = load_objective(AlgorithmConfig())
        self.objective = loaded.objective
        self.decision_size = loaded.decision_size
        self.numbers = Numbers(loaded.report_names, corrects=False)

    def add_up(self, reports: list[TokenReport], collected: Any, groups: ProcessGroups) -> Any:
        self._data_group = groups.data
        return LossStage.add_up(self, reports, collected)  # type: ignore[arg-type]


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
        return _read(reports, torch.tensor(collected), staged, 2)


def reduce_over_data_ranks() -> dict[str, Any]:
    """Two data-parallel ranks with one micro-batch each, and one search for both."""
    with joined() as groups:
        reports = [_report(1.0 + groups.rank, 0.0, False)]
        return _read(reports, torch.tensor([groups.rank + 1, 2]), groups, 1)


def _read(
    reports: list[TokenReport], collected: Tensor, groups: ProcessGroups, num_decisions: int
) -> dict[str, Any]:
    """What two updates with these reports are found to be, which must be the same."""
    measurement = measure(reports, STAGE, groups, num_decisions)
    faults = STAGE.add_up(reports, collected, groups)[1] if groups.is_last_stage else None
    remarks = torch.tensor([True, False]) if groups.is_last_stage else None
    verdict = judge(measurement, faults, remarks, STAGE, groups).tolist()
    first, second = read_measurements([measurement, measurement], STAGE, groups)
    assert first == second
    return {
        "sums": first.sums,
        "maxima": first.maxima,
        "decisions": first.decisions,
        "faults": verdict[:NUM_FAULTS],
        "remarks": verdict[NUM_FAULTS:],
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
