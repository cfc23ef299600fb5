"""Training from dumps gives the same losses, bounds and gradient norms in every layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file

from tests.distributed_launch import run_ranks
from tests.trainer.dumps import write_dump_shapes
from tests.trainer.layout_ranks import CASES, Case, Outcome, train_in, with_references

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.distributed

SAME = (
    *("loss/policy", "policy/grad_norm", "policy/entropy", "policy/kl_behaviour"),
    *("policy/effective_sample_share", "policy/negative_doubled_share"),
)
EQUAL = (
    "clip/low",
    "clip/high",
    "bapo/exit_start_share",
    "bapo/exit_met_share",
    "train/updates",
)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> dict[str, Path]:
    return write_dump_shapes(tmp_path_factory.mktemp("dumps"), random_model, steps=1)


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, replay_config: Path, dumps: dict[str, Path]
) -> dict[str, Outcome]:
    """What became of every case and of what each is compared with, by name."""
    outcomes: dict[str, Outcome] = {}
    for ranks in (1, 2, 4):
        cases = with_references(ranks)
        root = tmp_path_factory.mktemp(f"ranks_{ranks}")
        outcomes |= run_ranks(train_in, ranks, cases, replay_config, dumps, root, timeout_s=500)[0]
    return outcomes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_layout_trains_like_one_rank_and_exports_its_weights(
    trained: dict[str, Outcome], random_model: Path, case: Case
) -> None:
    outcome, expected = trained[case.name], trained[case.reference.name]
    (row,), (reference,) = outcome.rows, expected.rows  # of two updates
    assert row["policy/grad_norm"] > 0.01
    for name in SAME:
        assert row[name] == pytest.approx(reference[name], rel=1e-5, abs=1e-5), name
    for name in EQUAL:
        assert row[name] == reference[name], name
    start = load_file(random_model / "model.safetensors")
    assert outcome.weights.keys() == expected.weights.keys() == start.keys()
    for name, weight in outcome.weights.items():
        assert (weight - start[name]).abs().max() > 1e-4, name  # Adam moves all by lr at least once
        assert (weight - expected.weights[name]).abs().max() < 1e-4, name


def test_the_bounds_that_layouts_agree_on_are_not_all_alike(
    trained: dict[str, Outcome],
) -> None:
    highs = {row["clip/high"] for outcome in trained.values() for row in outcome.rows}
    assert len(highs) > 2


def test_ranks_without_work_still_take_part(trained: dict[str, Outcome]) -> None:
    (imbalance, *_) = [
        row["train/imbalance_ratio"] for row in trained["DP 4, two ranks without a token"].rows
    ]
    assert imbalance >= 2.0  # two of four ranks have all of the work
