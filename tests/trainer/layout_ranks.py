"""Trains from dumps in one layout after the other; used by test_layouts.py and the benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from bapo_megatron.config.load import load_config
from bapo_megatron.data.token_dump import read_token_dump
from bapo_megatron.telemetry.sinks import read_metrics
from bapo_megatron.trainer.checkpointing import Checkpoints
from tests.distributed_launch import take_port
from tests.trainer.runs import train_whole_run

SEQUENCE = ("parallel.tensor=2", "parallel.sequence=true")
OVERLAP = ("megatron.overlap_grad_reduce=true", "megatron.overlap_param_gather=true")


@dataclass(frozen=True)
class Case:
    """A layout to train in."""

    name: str
    ranks: int
    overrides: tuple[str, ...] = ()
    dumps: str = "mixed"
    """``mixed``: 16 samples per step. ``uneven``: 3 samples per update, which two ranks cannot
    share equally. ``few``: 2 samples per update, fewer than four ranks."""
    algorithm: tuple[str, ...] = ()
    """Overrides that the rank it is compared with has as well."""

    @property
    def reference(self) -> Case:
        """The same training on one rank."""
        name = ", ".join(("one rank", self.dumps, *self.algorithm))
        return Case(name, 1, dumps=self.dumps, algorithm=self.algorithm)


@dataclass(frozen=True)
class Outcome:
    """What a training left behind."""

    rows: list[dict[str, Any]]
    """Metrics of each step."""
    weights: dict[str, Tensor]
    """Weights of the exported model."""
    tokens: dict[str, dict[str, np.ndarray]]
    """Columns of the tokens of each update, by the name of their file."""


# What is in several of them is not a case of its own.
CASES = (
    Case("one rank, full recompute", 1, ("megatron.recompute=full",)),
    Case("one rank, selective recompute", 1, ("megatron.recompute=selective",)),
    Case("TP 2, SP", 2, SEQUENCE),
    Case("PP 2, VPP 2", 2, ("parallel.pipeline=2", "parallel.virtual_pipeline=2")),
    # Bounds for each micro-batch, chosen in the middle of the schedule by the last stages alone.
    Case("PP 2, recipe", 2, ("parallel.pipeline=2",), algorithm=("algorithm.bapo.preset=recipe",)),
    Case("CP 2, chunked logits", 2, ("parallel.context=2", "ops.logits_chunk_tokens=16")),
    Case("DP 2, uneven", 2, dumps="uneven"),
    Case("PP 2, bf16", 2, ("parallel.pipeline=2",), algorithm=("model.dtype=bfloat16",)),
    Case(
        "CP 2 × PP 2, VPP 2, recomputed",
        4,
        ("parallel.context=2", "parallel.pipeline=2", "parallel.virtual_pipeline=2"),
        algorithm=("algorithm.behaviour=recomputed",),
    ),
    Case(
        "CP 2 × DP 2, overlap",
        4,
        ("parallel.context=2", "train.max_tokens_per_micro_batch=64", *OVERLAP),
    ),
    Case("TP 2 × PP 2, SP", 4, (*SEQUENCE, "parallel.pipeline=2")),
    Case("CP 2 × TP 2, SP", 4, (*SEQUENCE, "parallel.context=2")),
    Case(
        "PP 2 × DP 2, VPP 2, overlap, recompute",
        4,
        (
            "parallel.pipeline=2",
            "parallel.virtual_pipeline=2",
            "megatron.recompute=full",
            *OVERLAP,
        ),
    ),
    Case("DP 4, two ranks without a token", 4, dumps="few"),
)


OTHER_MODEL = "OTHER_MODEL"
"""Stands for another model than the policy, of the same tokens."""
KL = ("algorithm.kl.coefficient=0.3", f"algorithm.kl.reference.path={OTHER_MODEL}")
FROZEN = {
    "KL loss": KL,
    "KL in the reward": (*KL, "algorithm.kl.where=reward", "algorithm.kl.kind=k1"),
    "teacher": (
        "algorithm.distillation.coefficient=0.2",
        f"algorithm.distillation.teacher={{path: {OTHER_MODEL}, memory: host}}",
    ),
    "own reference": (
        "algorithm.kl.coefficient=1",
        "algorithm.updates_per_batch=1",
        "optimizer.warmup_updates=0",
    ),
}
"""Overrides of algorithms with a frozen model."""
DIVIDED = ("TP 2, SP", "PP 2, VPP 2", "CP 2, chunked logits", "DP 2, uneven")
FROZEN_CASES = tuple(
    Case(f"{case.name}, {name}", case.ranks, case.overrides, case.dumps, algorithm)
    for case in CASES
    if case.name in DIVIDED
    for name, algorithm in FROZEN.items()
)


def with_references(num_ranks: int, every: tuple[Case, ...] = CASES) -> tuple[Case, ...]:
    """The cases of so many ranks; with 1, also what all cases are compared with."""
    references = tuple({case.reference.name: case.reference for case in every}.values())
    cases = tuple(case for case in every if case.ranks == num_ranks)
    return (*references, *cases) if num_ranks == 1 else cases


def train_in(
    cases: tuple[Case, ...],
    config: Path,
    dumps: dict[str, Path],
    root: Path,
    other_model: Path | None = None,
) -> dict[str, Outcome]:
    """Train in each layout; returns the outcomes by the layouts' names, on every rank."""
    outcomes = {}
    for number, case in enumerate(cases):
        take_port()
        run_dir = root / str(number)
        overrides = [f"run_dir={run_dir}", f"replay={dumps[case.dumps]}", "train.dump_tokens=1"]
        overrides += [*case.overrides, *case.algorithm]
        steps = len(list(dumps[case.dumps].glob("step_*.parquet")))
        overrides += [f"train.steps={steps}", "log.console=false"]
        loaded = load_config(config, [o.replace(OTHER_MODEL, str(other_model)) for o in overrides])
        with mock.patch.object(Checkpoints, "save"):  # it takes longer than the training
            train_whole_run(loaded)
        outcomes[case.name] = Outcome(
            rows=read_metrics(run_dir / "metrics.jsonl"),
            weights=load_file(run_dir / "hf" / "model.safetensors"),
            tokens={path.name: read_token_dump(path) for path in (run_dir / "tokens").iterdir()},
        )
    return outcomes
