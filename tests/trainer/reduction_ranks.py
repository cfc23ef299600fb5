"""What the ranks of test_step_reduction.py do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.config.schema import AlgorithmConfig
from bapo_megatron.ops.contributions import BOUNDS_FIELDS, REFUSED
from bapo_megatron.ops.logprob import TokenLogprobs
from bapo_megatron.runtime.distributed import ProcessGroups
from bapo_megatron.trainer.loss import LossStage
from bapo_megatron.trainer.measurement import NUM_FAULTS, judge, measure, read_measurements
from bapo_megatron.trainer.records import Numbers, TokenReport
from tests.distributed_launch import joined


class _Stage(LossStage):
    """A loss stage without a model's output."""

    def __init__(self, groups: ProcessGroups) -> None:
        loaded = load_objective(AlgorithmConfig())
        self.objective = loaded.objective
        self.decision_size = loaded.decision_size
        self.numbers = Numbers(loaded.report_names, corrects=False)
        self._data_group = groups.data


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
        stage = _Stage(staged)
        updates = [
            [_report(stage, scale, nonfinite_tokens, False), _report(stage, 10 * scale, 0, refused)]
            for scale in (1.0, 2.0)
        ]
        return _read(stage, updates, torch.tensor(collected), staged, 2)


def reduce_over_data_ranks() -> dict[str, Any]:
    """Two data-parallel ranks with one micro-batch each, and one search for both."""
    with joined() as groups:
        stage = _Stage(groups)
        updates = [[_report(stage, scale + groups.rank, 0.0, False)] for scale in (1.0, 4.0)]
        return _read(stage, updates, torch.tensor([groups.rank + 1, 2]), groups, 1)


def _read(
    stage: _Stage,
    updates: list[list[TokenReport]],
    collected: Tensor,
    groups: ProcessGroups,
    num_decisions: int,
) -> dict[str, Any]:
    """Return what a rank learns of updates, and of the first before it is made."""
    faults = remarks = None
    if groups.is_last_stage:
        faults = stage.add_up(updates[0], collected)[1]
        remarks = torch.tensor([True, False])
    reports = updates if groups.is_last_stage else [[] for _ in updates]
    measurements = [measure(own, stage, groups, num_decisions) for own in reports]
    verdict = judge(measurements[0].decisions, faults, remarks, stage, groups).tolist()
    results = read_measurements(measurements, stage, groups)
    return {
        "tokens": [result.sums["tokens"] for result in results],
        "oldest": [result.maxima["rollout/staleness_max"] for result in results],
        "low": [[decision["bapo/clip_low"] for decision in r.decisions] for r in results],
        "faults": verdict[:NUM_FAULTS],
        "remarks": verdict[NUM_FAULTS:],
    }


def _report(stage: _Stage, value: float, nonfinite_tokens: float, refused: bool) -> TokenReport:
    sums, maxima = (zeros + value for zeros in stage.numbers.zeros(torch.device("cpu")))
    names = stage.numbers.sum_names
    sums[names.index("nonfinite_tokens")] = nonfinite_tokens
    sums[names.index("nonfinite_losses")] = 0
    bounds = torch.zeros(len(BOUNDS_FIELDS), dtype=torch.float64)
    bounds[BOUNDS_FIELDS.index("low")] = value
    bounds[BOUNDS_FIELDS.index("exit")] = REFUSED if refused else 0
    policy = TokenLogprobs(torch.zeros(0), torch.zeros(0))
    return TokenReport(sums=sums, maxima=maxima, decision=bounds, policy=policy)
