"""Training from dumps gives the same losses, bounds, norms, weights and tokens in every layout."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from safetensors.torch import load_file
from torch import Tensor

from bapo_megatron.config.load import load_config
from bapo_megatron.data.dump import read_batch
from bapo_megatron.data.token_dump import read_token_dump
from bapo_megatron.telemetry.sinks import read_metrics
from bapo_megatron.trainer.checkpointing import Checkpoints
from tests.distributed_launch import run_ranks, take_port
from tests.launch import run
from tests.trainer.dumps import write_dumps
from tests.trainer.runs import train, train_whole_run

pytestmark = pytest.mark.distributed

SEQUENCE = ("parallel.tensor=2", "parallel.sequence=true")
OVERLAP = ("megatron.overlap_grad_reduce=true", "megatron.overlap_param_gather=true")


CENTERED = (
    "algorithm.objective=reinforce",
    *("algorithm.centering.top_k=8", "ops.logits_chunk_tokens=16"),
)


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
    Case("CP 2 × TP 2, SP, centered", 4, (*SEQUENCE, "parallel.context=2"), algorithm=CENTERED),
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

SAME = (
    *("loss/policy", "policy/grad_norm", "policy/entropy", "policy/kl_behaviour"),
    *("policy/effective_sample_share", "policy/negative_doubled_share"),
    *("clip/fraction_positive", "clip/fraction_negative"),
    *("rollout/staleness_max", "mismatch/logprob_abs_max", "kl/reference", "kl/teacher"),
    *("centering/removed_ratio", "centering/policy_mass_mean"),
)
EQUAL = (
    "clip/low",
    "clip/high",
    "bapo/exit_start_share",
    "bapo/exit_met_share",
    "train/updates",
)
PLACES = ("group_id", "index", "position")
"""Columns of a dump of tokens that say which they are."""
SHAPES = {
    "mixed": {"groups": 4, "samples_per_group": 4},
    "uneven": {"groups": 2, "samples_per_group": 3},
    "few": {"groups": 2, "samples_per_group": 2},
}
"""The dumps of one step that layouts train from (``Case.dumps``)."""


def train_in(
    cases: tuple[Case, ...],
    config: Path,
    dumps: dict[str, Path],
    root: Path,
    other_model: Path,
) -> dict[str, Outcome]:
    """Train in each layout; returns the outcomes by the layouts' names, on every rank."""
    outcomes = {}
    for number, case in enumerate(cases):
        take_port()
        run_dir = root / str(number)
        overrides = [f"run_dir={run_dir}", f"replay={dumps[case.dumps]}", "train.dump_tokens=1"]
        overrides += [*case.overrides, *case.algorithm, "train.steps=1", "log.console=false"]
        loaded = load_config(config, [o.replace(OTHER_MODEL, str(other_model)) for o in overrides])
        with mock.patch.object(Checkpoints, "save"):  # it takes longer than the training
            train_whole_run(loaded)
        outcomes[case.name] = Outcome(
            rows=read_metrics(run_dir / "metrics.jsonl"),
            weights=load_file(run_dir / "hf" / "model.safetensors"),
            tokens={path.name: read_token_dump(path) for path in (run_dir / "tokens").iterdir()},
        )
    return outcomes


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("dumps")
    return {
        name: write_dumps(root / name, random_model, steps=1, episodes=True, top_k=8, **shape)
        for name, shape in SHAPES.items()
    }


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
    replay_config: Path,
    dumps: dict[str, Path],
    other_model: Path,
) -> dict[str, Outcome]:
    """What became of every case and of what each is compared with, by name."""
    outcomes: dict[str, Outcome] = {}
    for every in (CASES, FROZEN_CASES):
        references = dict.fromkeys(case.reference for case in every)
        for ranks in sorted({1, *(case.ranks for case in every)}):
            cases = tuple(case for case in (*references, *every) if case.ranks == ranks)
            root = tmp_path_factory.mktemp(f"ranks_{ranks}")
            arguments = (cases, replay_config, dumps, root, other_model)
            outcomes |= run_ranks(train_in, ranks, *arguments, timeout_s=500)[0]
    return outcomes


@pytest.mark.parametrize("case", [*CASES, *FROZEN_CASES], ids=lambda case: case.name)
def test_a_layout_trains_like_one_rank_and_exports_its_weights(
    trained: dict[str, Outcome], random_model: Path, case: Case
) -> None:
    outcome, expected = trained[case.name], trained[case.reference.name]
    (row,), (reference,) = outcome.rows, expected.rows  # of two updates
    assert row["policy/grad_norm"] > 0.01
    for name in reference.keys() & {*SAME}:
        assert row[name] == pytest.approx(reference[name], rel=1e-5, abs=1e-5), name
    for name in EQUAL:
        assert row.get(name) == reference.get(name), name  # a search of bounds only with BAPO
    start = load_file(random_model / "model.safetensors")
    assert outcome.weights.keys() == expected.weights.keys() == start.keys()
    for name, weight in outcome.weights.items():
        assert (weight - start[name]).abs().max() > 1e-4, name  # Adam moves all by lr at least once
        assert (weight - expected.weights[name]).abs().max() < 1e-4, name
    assert outcome.tokens.keys() == expected.tokens.keys()
    for name, columns in outcome.tokens.items():
        for column, values in columns.items():
            tolerance = 0 if column in PLACES else 2e-5
            np.testing.assert_allclose(values, expected.tokens[name][column], 0, tolerance)


def test_what_layouts_agree_on_is_not_all_alike(trained: dict[str, Outcome]) -> None:
    highs = {row.get("clip/high") for outcome in trained.values() for row in outcome.rows}
    assert len(highs) > 2
    rows = [trained[f"TP 2, SP, {name}"].rows[0] for name in ("KL loss", "KL in the reward")]
    rows.append(trained["TP 2, SP, teacher"].rows[0])
    assert len({row["policy/grad_norm"] for row in rows}) == 3
    # k1 of a teacher may be negative.
    assert all(abs(row.get("kl/reference", row.get("kl/teacher"))) > 0.1 for row in rows)


@pytest.mark.parametrize("layout", ["one rank", *DIVIDED])
def test_the_policy_at_the_start_is_its_own_reference_bit_for_bit(
    trained: dict[str, Outcome], layout: str
) -> None:
    own = Case("", 1, algorithm=FROZEN["own reference"]).reference.name
    name = own if layout == "one rank" else f"{layout}, own reference"
    assert trained[name].rows[0]["kl/reference"] == 0.0


def test_ranks_without_work_still_take_part(trained: dict[str, Outcome]) -> None:
    (imbalance, *_) = [
        row["train/imbalance_ratio"] for row in trained["DP 4, two ranks without a token"].rows
    ]
    assert imbalance >= 2.0  # two of four ranks have all of the work


def test_every_update_has_a_file_with_its_tokens(
    trained: dict[str, Outcome], dumps: dict[str, Path]
) -> None:
    samples = read_batch(dumps["mixed"] / "step_000001.parquet").samples
    tokens = trained["TP 2, SP"].tokens
    assert len(tokens) == 2
    for update, update_samples in enumerate((samples[:8], samples[8:])):
        columns = tokens[f"step_000001_update_{update:03d}.parquet"]
        behaviour = np.concatenate([sample.behaviour_logprobs for sample in update_samples])
        assert np.array_equal(columns["behaviour_logprob"], behaviour)
        places = [
            (sample.group_id, sample.index, position)
            for sample in update_samples
            for position in np.flatnonzero(sample.loss_mask).tolist()
        ]
        assert list(zip(*(columns[name].tolist() for name in PLACES), strict=True)) == places
        assert set(columns["mask"].tolist()) == {1.0}
        assert (columns["entropy"] > 0).all()


@pytest.mark.slow
def test_bounds_of_the_file_of_every_nth_step_are_those_that_the_update_had(
    replay_config: Path, tmp_path: Path
) -> None:
    settings = ("algorithm.updates_per_batch=1", "algorithm.bapo.target=0.4", "train.steps=3")
    dumped = ("train.dump_tokens=2", "ops.logits_chunk_tokens=13", "checkpoint.at_end=false")
    rows = train(replay_config, tmp_path, *settings, *dumped, ranks=2)
    (path,) = (tmp_path / "tokens").iterdir()
    assert path.name == "step_000002_update_000.parquet"
    result = run(["bounds", str(path), "--json"])
    assert result.returncode == 0, result.stderr
    bounds, row = json.loads(result.stdout), rows[1]
    assert bounds["clip_low"] == pytest.approx(row["clip/low"])
    assert bounds["clip_high"] == pytest.approx(row["clip/high"])
    assert bounds["positive_share"] == pytest.approx(row["bapo/positive_share"], abs=1e-12)
    assert row[f"bapo/exit_{bounds['exit']}_share"] == 1.0
