"""Responses with A = 0 are left out of both passes, and nothing that is learned changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from bapo_megatron.data.dump import read_batch, write_batch
from tests.distributed_launch import run_ranks
from tests.trainer.aggregation_ranks import gradients_of_each_setting

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.distributed

OWN = "tests.algorithm.own_objectives"
NO_BONUS = {"entropy_coefficient": 0.0}
CORRECTED = {"behaviour": "recomputed", "correction": {"kind": "sequence", "cap": 1.05}}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bapo": (NO_BONUS, {}),
    "bapo, recomputed": ({**NO_BONUS, **CORRECTED, "loss_aggregation": "sequence_mean"}, {}),
    "gspo": ({**NO_BONUS, "objective": f"{OWN}:Gspo"}, {}),
}
"""Sections algorithm and rollout.staleness, of objectives to which A = 0 gives nothing."""
KEPT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "entropy bonus": ({"entropy_coefficient": 0.01}, {}),
    "bounds of micro-batches": ({**NO_BONUS, "bapo": {"scope": "micro_batch"}}, {}),
    "selected tokens": ({**NO_BONUS, "objective": f"{OWN}:HighEntropy"}, {}),
    "nothing declared": ({**NO_BONUS, "objective": f"{OWN}:cispo"}, {}),
}
"""Where responses with A = 0 are computed."""
TWO_UPDATES = {"two updates": ({**NO_BONUS, **CORRECTED, "updates_per_batch": 2}, {})}


@pytest.fixture(scope="module")
def half_equal(
    tmp_path_factory: pytest.TempPathFactory, random_model: Path, episode_dump: Path
) -> Path:
    """A batch of four groups; in the last two all rewards are equal."""
    batch = read_batch(episode_dump)
    for group in batch.groups[2:]:
        for sample in group.samples:
            sample.reward = 1.0
    path = tmp_path_factory.mktemp("half") / "step_000001.parquet"
    write_batch(path, batch)
    return path


@pytest.fixture(scope="module")
def updates(random_model: Path, half_equal: Path) -> list[dict[str, dict[str, Any]]]:
    """One update of every setting, of each of two data-parallel ranks."""
    settings = SETTINGS | KEPT | TWO_UPDATES
    return run_ranks(gradients_of_each_setting, 2, random_model, half_equal, {}, settings)


@pytest.fixture(scope="module")
def full_updates(random_model: Path, half_equal: Path) -> dict[str, dict[str, Any]]:
    """The same where every response is computed, on one rank."""
    arguments = (random_model, half_equal, {}, SETTINGS, "trained")
    return run_ranks(gradients_of_each_setting, 1, *arguments)[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_bounds_and_gradients_are_those_of_the_whole_update(
    updates: list[dict[str, dict[str, Any]]], full_updates: dict[str, dict[str, Any]], name: str
) -> None:
    full = full_updates[name]
    for rank in updates:
        update = rank[name]
        assert update["slots"] < 0.7 * full["slots"]
        assert update["sums"]["computed_tokens"] == update["sums"]["tokens"]
        assert update["sums"]["tokens"] < full["sums"]["tokens"]
        assert update["sums"]["unmasked_tokens"] == full["sums"]["tokens"]
        assert update["bounds"] == full["bounds"]
        assert update["decisions"] == full["decisions"]
        assert update["loss"] == pytest.approx(full["loss"], abs=1e-6)
        for weight, gradient in full["gradients"].items():
            scale = max(1.0, float(gradient.abs().max()))
            difference = float((update["gradients"][weight] - gradient).abs().max())
            assert difference <= 1e-6 * scale, weight


@pytest.mark.parametrize("name", KEPT)
def test_what_may_need_them_has_them_computed(
    updates: list[dict[str, dict[str, Any]]], name: str
) -> None:
    sums = updates[0][name]["sums"]
    assert sums["tokens"] == sums["computed_tokens"] == sums["unmasked_tokens"]


def test_an_update_of_which_nothing_remains_is_skipped_on_every_rank(
    updates: list[dict[str, dict[str, Any]]],
) -> None:
    for rank in updates:
        update = rank["two updates"]
        assert not update["skipped"]
        assert update["further_skipped"] == [True]
        assert update["optimizer_steps"] == 1
