"""Training from dumps gives the same losses, bounds, norms, weights and tokens in every layout."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from bapo_megatron.data.dump import read_batch
from tests.distributed_launch import run_ranks
from tests.launch import run
from tests.trainer.dumps import write_dump_shapes
from tests.trainer.layout_ranks import (
    CASES,
    DIVIDED,
    FROZEN,
    FROZEN_CASES,
    Case,
    Outcome,
    train_in,
    with_references,
)
from tests.trainer.runs import train

pytestmark = pytest.mark.distributed

SAME = (
    *("loss/policy", "policy/grad_norm", "policy/entropy", "policy/kl_behaviour"),
    *("policy/effective_sample_share", "policy/negative_doubled_share"),
    *("clip/fraction_positive", "clip/fraction_negative"),
    *("rollout/staleness_max", "mismatch/logprob_abs_max", "kl/reference", "kl/teacher"),
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


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> dict[str, Path]:
    return write_dump_shapes(tmp_path_factory.mktemp("dumps"), random_model, steps=1)


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
        for ranks in sorted({1, *(case.ranks for case in every)}):
            cases = with_references(ranks, every)
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
        assert row[name] == reference[name], name
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
    highs = {row["clip/high"] for outcome in trained.values() for row in outcome.rows}
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
