"""Trains with and without predicted decisions; used by test_speculation.py."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor

from bapo_megatron.data.dump import read_batch
from bapo_megatron.ops.logprob import TokenLogprobs
from bapo_megatron.runtime.distributed import ProcessGroups
from bapo_megatron.trainer import speculation
from bapo_megatron.trainer.loss import PolicyOutput
from bapo_megatron.types import FinishReason, RolloutBatch, UpdateResult
from tests.distributed_launch import joined
from tests.trainer import one_update


@dataclass(frozen=True)
class Case:
    """What is trained, in which layout."""

    name: str
    sizes: dict[str, int] = field(default_factory=dict)
    """Of ``ParallelConfig``."""
    algorithm: dict[str, Any] = field(default_factory=dict)
    ops: dict[str, Any] = field(default_factory=dict)
    megatron: dict[str, Any] = field(default_factory=dict)
    spoils: str = ""
    """``values``: a token of step 2 has no μ, and one half of step 3 no gradient. ``responses``:
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
        for part in (slice(0, 2), slice(2, None)):
            trainer = replace(trainer)  # what was learnt is lost, as in a resume
            for path in sorted(dumps.glob("step_*.parquet"))[part]:
                results += trainer.train(_spoiled(read_batch(path), case.spoils))
    chunks = trainer.policy.chunks
    weights = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
    return Outcome(results, weights, said)


def _spoiled(batch: RolloutBatch, how: str) -> RolloutBatch:
    groups = list(batch.groups)
    for index, group in enumerate(groups):
        samples = list(group.samples)
        if how == "values" and batch.step == 3 and index % 2:
            samples = [replace(sample, reward=1.0) for sample in samples]
        if how == "responses":
            others = [replace(s, finish_reason=FinishReason.LENGTH) for s in samples[1:]]
            samples = [samples[0], *others]
        if how == "values" and batch.step == 2 and index == 0:
            behaviour = samples[0].behaviour_logprobs.copy()
            behaviour[0] = np.nan
            samples[0] = replace(samples[0], behaviour_logprobs=behaviour)
        groups[index] = replace(group, samples=tuple(samples))
    return replace(batch, groups=tuple(groups))


def bits(value: Any) -> Any:
    """The value with its floats as exact text, so that NaN equals NaN."""
    if isinstance(value, dict):
        return {name: bits(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [bits(each) for each in value]
    return value.hex() if isinstance(value, float) else value
