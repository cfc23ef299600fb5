"""Every stage learns of faults before an optimizer step, and of sums at the end of the step.

``test_layouts.py`` has the sums of data-parallel ranks.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bapo_megatron.algorithm.loss import RESPONSE_UNIT
from bapo_megatron.algorithm.objective import hide_rest
from bapo_megatron.ops.contributions import BOUNDS_FIELDS, EXIT_NAMES
from bapo_megatron.ops.logprob import TokenLogprobs
from bapo_megatron.runtime.distributed import ProcessGroups
from bapo_megatron.trainer.loss import LossInputs, LossStage
from bapo_megatron.trainer.records import (
    MeasuredUpdate,
    TokenReport,
    read_measurements,
)
from bapo_megatron.trainer.step import NUM_FAULTS, check
from tests.distributed_launch import joined, run_ranks
from tests.fakes.given_tokens import make_micro_batch, make_stage

pytestmark = pytest.mark.distributed

MICRO_BATCH = make_micro_batch(behaviour_logprob_T=torch.zeros(1))
LOCAL = {"bapo": {"scope": "micro_batch"}}


def reduce_on_two_stages(
    nonfinite_tokens: float, refused: bool, collected: tuple[int, int] = (0, 0)
) -> dict[str, Any]:
    """Rank 0 is the first pipeline stage and has no reports, rank 1 the last one."""
    with joined() as groups:
        staged = _two_stages(groups)
        stage = make_stage(staged, LOCAL)
        updates = [
            [_report(stage, scale, nonfinite_tokens, False), _report(stage, 10 * scale, 0, refused)]
            for scale in (1.0, 2.0)
        ]
        decided = LossInputs((MICRO_BATCH, MICRO_BATCH), faults=torch.tensor(collected))
        return _read(stage, updates, decided, staged)


def compare_on_two_stages() -> list[list[float]]:
    """The remarks on a prediction that is right, and on one that is wrong, on each stage."""
    with joined() as groups:
        staged = _two_stages(groups)
        stage = make_stage(staged, {})
        reports = [_report(stage, 3.0, 0.0, False)] if staged.is_last_stage else []
        remarks = []
        for predicted in (3.0, 4.0):
            decided = LossInputs((MICRO_BATCH,), _bounds(3.0))
            if staged.is_last_stage:
                decided = replace(decided, prediction=hide_rest(_bounds(predicted), slice(0, 2)))
            remarks.append(check(reports, decided, stage, staged)[2][NUM_FAULTS:].tolist())
        return remarks


def _two_stages(groups: ProcessGroups) -> ProcessGroups:
    data_groups = [dist.new_group([0]), dist.new_group([1])]
    return replace(
        groups,
        data=data_groups[groups.rank],
        pipeline=dist.new_group([0, 1]),
    )


def _read(
    stage: LossStage, updates: list[list[TokenReport]], decided: LossInputs, groups: ProcessGroups
) -> dict[str, Any]:
    """Return what a rank learns of updates, and of the first before it is made."""
    reports = updates if groups.is_last_stage else [[] for _ in updates]
    checks = [check(update, decided, stage, groups) for update in reports]
    # Three responses, of which an update computes the last two: log w = 0 and, here, rank · log 3.
    log_weight_B = torch.tensor([50.0, 0.0, groups.rank * math.log(3)], dtype=torch.float64)
    log_weight_B = (log_weight_B / RESPONSE_UNIT).to(torch.int64)
    measured = [
        MeasuredUpdate(
            {}, *stage.numbers.add(update, groups.device), decisions, log_weight_B, 1.0, (1, 2)
        )
        for update, (_, decisions, _) in zip(reports, checks, strict=True)
    ]
    results = read_measurements(measured, stage.numbers, stage.objective, groups)
    return {
        "tokens": [result.sums["tokens"] for result in results],
        "effective": [round(result.sums["effective_samples"], 6) for result in results],
        "oldest": [result.maxima["rollout/staleness_max"] for result in results],
        "low": [[decision["clip/low"] for decision in r.decisions] for r in results],
        "faults": checks[0][2][:NUM_FAULTS].tolist(),
    }


def _bounds(low: float, refused: bool = False) -> torch.Tensor:
    bounds = torch.zeros(len(BOUNDS_FIELDS), dtype=torch.float64)
    bounds[BOUNDS_FIELDS.index("low")] = low
    bounds[BOUNDS_FIELDS.index("exit")] = EXIT_NAMES.index("refused") if refused else 0
    return bounds


def _report(stage: LossStage, value: float, nonfinite_tokens: float, refused: bool) -> TokenReport:
    sums, maxima = (zeros + value for zeros in stage.numbers.zeros(torch.device("cpu")))
    names = stage.numbers.sum_names
    sums[names.index("nonfinite_tokens")] = nonfinite_tokens
    sums[names.index("nonfinite_losses")] = 0
    policy = TokenLogprobs(torch.zeros(0), torch.zeros(0))
    return TokenReport(
        sums, maxima, _bounds(value, refused), policy, torch.zeros(1, dtype=torch.int64)
    )


def test_a_stage_without_logits_learns_sums_and_decisions_of_the_last_stage() -> None:
    first, last = run_ranks(reduce_on_two_stages, 2, 0.0, False)
    assert first == last
    assert first["tokens"] == [11, 22]
    assert first["effective"] == [1.6, 1.6]  # (1 + 3)² / (1 + 9): those of the last stage
    assert first["oldest"] == [10, 20]
    assert first["low"] == [[1, 10], [2, 20]]
    assert first["faults"] == [0, 0, 0, 0, 0]


def test_faults_of_the_last_stage_and_of_its_collection_pass_reach_the_other_stages() -> None:
    for rank in run_ranks(reduce_on_two_stages, 2, 3.0, True, (5, 7)):
        assert rank["faults"] == [3, 0, 5, 7, 1]


def test_all_stages_learn_whether_a_prediction_was_wrong() -> None:
    for remarks in run_ranks(compare_on_two_stages, 2):
        assert remarks == [[0, 0], [1, 0]]
