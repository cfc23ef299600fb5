"""Predicted decisions change no bit of a training, only the passes that it takes."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from bapo_megatron.data.dump import read_batch
from bapo_megatron.ops.logprob import TokenLogprobs
from bapo_megatron.policy.model import PolicyOutput
from bapo_megatron.runtime.distributed import ProcessGroups
from bapo_megatron.trainer import speculation
from bapo_megatron.types import FinishReason, RolloutBatch, UpdateResult
from tests.distributed_launch import joined, run_ranks
from tests.trainer import one_update
from tests.trainer.dumps import write_dumps

pytestmark = pytest.mark.distributed


@dataclass(frozen=True)
class Case:
    """What is trained, in which layout."""

    name: str
    sizes: dict[str, int] = field(default_factory=dict)
    """Fields of ``ParallelConfig``."""
    algorithm: dict[str, Any] = field(default_factory=dict)
    ops: dict[str, Any] = field(default_factory=dict)
    megatron: dict[str, Any] = field(default_factory=dict)
    spoils: str = ""
    """``values``: a token of step 1 has no μ, and one half of step 2 no gradient. ``responses``:
    only the first of each group trains, so that a rank has no token."""
    modes: tuple[str, ...] = ("never", "always")


@dataclass(frozen=True)
class Outcome:
    """What a training left behind on one rank."""

    results: list[UpdateResult]
    weights: list[Tensor]
    said: list[str]


def train_in_each_mode(
    model_dir: Path, dumps: Path, cases: tuple[Case, ...]
) -> dict[tuple[str, str], Outcome]:
    """Train from dumps; returns the outcomes by names of case and mode."""
    outcomes = {}
    for case in cases:
        with joined(**case.sizes) as groups:
            for mode in case.modes:
                outcomes[case.name, mode] = _train(model_dir, dumps, case, mode, groups)
    return outcomes


def train_with_other_kernels(model_dir: Path, dumps: Path) -> Outcome:
    """Train with ``auto`` where the pass without gradients gives slightly different log-probs."""
    read = PolicyOutput.read

    def inexact(self: PolicyOutput, *arguments: Any) -> TokenLogprobs:
        logprob_T, entropy_T = read(self, *arguments)
        return TokenLogprobs(logprob_T - 1e-6, entropy_T)

    with joined() as groups, mock.patch.object(PolicyOutput, "read", inexact):
        return _train(model_dir, dumps, Case("one rank"), "auto", groups)


def _train(model_dir: Path, dumps: Path, case: Case, mode: str, groups: ProcessGroups) -> Outcome:
    algorithm = {"updates_per_batch": 2, **case.algorithm}
    algorithm["bapo"] = {"target": 0.34, "speculate": mode}
    algorithm["m2po"] = {**algorithm.get("m2po", {}), "speculate": mode}
    trainer = one_update.build_trainer(
        model_dir,
        groups,
        one_update.Case(algorithm, ops=case.ops, budget=192),
        sizes=case.sizes,
        optimizer={"lr": 1e-3},
        megatron=case.megatron,
        masked_reasons={FinishReason.LENGTH},
    )
    said: list[str] = []
    results: list[UpdateResult] = []
    with mock.patch.object(speculation, "say", said.append):
        # ``auto`` relies on predictions from the third update on.
        first = 2 if "auto" in case.modes else 1
        for part in (slice(0, first), slice(first, first + 1)):
            trainer = replace(trainer)  # what was learnt is lost, as in a resume
            for path in sorted(dumps.glob("step_*.parquet"))[part]:
                results += trainer.train(_spoiled(read_batch(path), case.spoils))
    chunks = trainer.state.model.chunks
    weights = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
    return Outcome(results, weights, said)


def _spoiled(batch: RolloutBatch, how: str) -> RolloutBatch:
    groups = list(batch.groups)
    for index, group in enumerate(groups):
        samples = list(group.samples)
        if how == "values" and batch.step == 2 and index % 2:
            samples = [replace(sample, reward=1.0) for sample in samples]
        if how == "responses":
            others = [replace(s, finish_reason=FinishReason.LENGTH) for s in samples[1:]]
            samples = [samples[0], *others]
        if how == "values" and batch.step == 1 and index == 0:
            behaviour = samples[0].behaviour_logprobs.copy()
            behaviour[0] = np.nan
            samples[0] = replace(samples[0], behaviour_logprobs=behaviour)
        groups[index] = replace(group, samples=tuple(samples))
    return replace(batch, groups=tuple(groups))


def bits(value: Any) -> Any:
    """The value with its floats as exact text, so that NaN equals NaN."""
    if isinstance(value, dict):
        return {name: bits(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return value.hex() if isinstance(value, float) else value


TWO_EPOCHS = {"behaviour": "recomputed", "updates_per_batch": 4, "epochs": 2}
RECOMPUTED = {"recompute": "full"}
CASES = {
    1: (
        Case("one rank", modes=("never", "always", "auto")),
        Case("μ recomputed, two epochs", algorithm=TWO_EPOCHS),
        Case("spoiled values", algorithm={"on_nonfinite": "skip_update"}, spoils="values"),
    ),
    2: (
        Case("TP 2, M2PO", {"tensor": 2}, {"objective": "m2po", "m2po": {"budget": 1.0}}),
        Case("PP 2", {"pipeline": 2}, modes=("never", "auto")),
        Case("CP 2, chunks", {"context": 2}, {}, {"logits_chunk_tokens": 13}, RECOMPUTED),
        Case("DP 2, one without a token", algorithm={"updates_per_batch": 4}, spoils="responses"),
    ),
}
RUNS = [(case.name, mode) for cases in CASES.values() for case in cases for mode in case.modes[1:]]
WORK = ("forward_only_flops", "forward_backward_flops", "predictions", "hits", "relied")


@pytest.fixture(scope="module")
def stale_dumps(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """Three steps whose samples come from a policy far from the model: searches end everywhere."""
    return write_dumps(tmp_path_factory.mktemp("stale"), model_dir, steps=3, noise=0.7)


@pytest.fixture(scope="module")
def trained(model_dir: Path, stale_dumps: Path) -> dict[tuple[str, str], list[Outcome]]:
    """Outcomes of all ranks by names of case and mode."""
    outcomes: dict[tuple[str, str], list[Outcome]] = {}
    for ranks, cases in CASES.items():
        of_ranks = run_ranks(train_in_each_mode, ranks, model_dir, stale_dumps, cases)
        outcomes |= {name: [rank[name] for rank in of_ranks] for name in of_ranks[0]}
    return outcomes


def _sum(outcome: Outcome, name: str) -> float:
    return sum(result.sums.get(name, 0.0) for result in outcome.results)


@pytest.mark.parametrize(("case", "mode"), RUNS)
def test_a_training_with_predictions_equals_one_without_bit_for_bit(
    trained: dict[tuple[str, str], list[Outcome]], case: str, mode: str
) -> None:
    for outcome, plain in zip(trained[case, mode], trained[case, "never"], strict=True):
        for result, expected in zip(outcome.results, plain.results, strict=True):
            both = [
                {name: value for name, value in item.sums.items() if name not in WORK}
                for item in (result, expected)
            ]
            assert bits(both[0]) == bits(both[1])
            assert bits(result.maxima) == bits(expected.maxima)
            assert bits(result.decisions) == bits(expected.decisions)
            assert result.grad_norm.hex() == expected.grad_norm.hex()
            assert result.skipped == expected.skipped
        assert len(outcome.weights) == len(plain.weights) > 0
        for weight, other in zip(outcome.weights, plain.weights, strict=True):
            assert torch.equal(weight, other)


@pytest.mark.parametrize(("case", "mode"), [run for run in RUNS if run[1] == "always"])
def test_a_hit_takes_one_pass_and_a_miss_two(
    trained: dict[tuple[str, str], list[Outcome]], case: str, mode: str
) -> None:
    for outcome, plain in zip(trained[case, mode], trained[case, "never"], strict=True):
        pairs = zip(outcome.results, plain.results, strict=True)
        for result, expected in pairs:
            if not result.sums.get("predictions"):
                continue  # without a gradient, or log-probs are known
            flops = expected.sums["forward_backward_flops"]
            assert result.sums["forward_only_flops"] < expected.sums["forward_only_flops"]
            assert result.sums["forward_backward_flops"] == flops * (2 - result.sums["hits"])
    assert _sum(trained[case, mode][0], "hits") > 0


def test_the_searches_of_the_test_hit_and_miss_and_end_in_every_way(
    trained: dict[tuple[str, str], list[Outcome]],
) -> None:
    (outcome,) = trained["one rank", "always"]
    assert 0 < _sum(outcome, "hits") < _sum(outcome, "predictions") == 6
    exits = {n for r in outcome.results for d in r.decisions for n, v in d.items() if v == 1.0}
    assert {"bapo/exit_met_share", "bapo/exit_exhausted_share"} <= exits


def test_faults_and_missing_gradients_skip_the_same_updates(
    trained: dict[tuple[str, str], list[Outcome]],
) -> None:
    for mode in ("never", "always"):
        (outcome,) = trained["spoiled values", mode]
        assert sum(result.skipped for result in outcome.results) >= 1
        assert _sum(outcome, "nonfinite_tokens") == 1.0


def test_auto_begins_with_two_updates_that_rely_on_nothing(
    trained: dict[tuple[str, str], list[Outcome]],
) -> None:
    for outcome in (*trained["one rank", "auto"], *trained["PP 2", "auto"]):
        relied = [result.sums["relied"] for result in outcome.results]
        assert relied[:2] == [0.0, 0.0]
        assert outcome.said == []
    first, last = (rank.results[-1].sums for rank in trained["PP 2", "auto"])
    assert first == last


def test_auto_stays_off_where_the_passes_give_other_log_probs_and_says_so(
    model_dir: Path, stale_dumps: Path
) -> None:
    (outcome,) = run_ranks(train_with_other_kernels, 1, model_dir, stale_dumps)
    assert _sum(outcome, "predictions") == 2.0  # those of the trials of two trainers
    assert _sum(outcome, "relied") == 0.0
    assert ["different log-probs" in line for line in outcome.said] == [True, True]
