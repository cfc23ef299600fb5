"""Responses with A = 0 are left out of both passes, and nothing that is learned changes."""

from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.data.dump import read_batch, write_batch
from tests.distributed_launch import run_ranks
from tests.trainer.one_update import Case, Updates, assert_same_gradients, make_updates

pytestmark = pytest.mark.distributed

OWN = "tests.algorithm.own_objectives"
NO_BONUS = {"entropy_coefficient": 0.0}
CORRECTED = {"behaviour": "recomputed", "correction": {"kind": "sequence", "cap": 1.05}}
SETTINGS: dict[str, dict[str, Any]] = {
    "bapo": NO_BONUS,
    "bapo, recomputed": {**NO_BONUS, **CORRECTED, "loss_aggregation": "sequence_mean"},
    "gspo": {**NO_BONUS, "objective": f"{OWN}:Gspo"},
}
"""Objectives to which A = 0 gives nothing."""
KEPT: dict[str, dict[str, Any]] = {
    "entropy bonus": {"entropy_coefficient": 0.01},
    "bounds of micro-batches": {**NO_BONUS, "bapo": {"scope": "micro_batch"}},
    "selected tokens": {**NO_BONUS, "objective": f"{OWN}:HighEntropy"},
    "nothing declared": {**NO_BONUS, "objective": f"{OWN}:cispo"},
}
"""Where responses with A = 0 are computed."""
TWO_UPDATES = {"two updates": {**NO_BONUS, **CORRECTED, "updates_per_batch": 2}}


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
def updates(random_model: Path, half_equal: Path) -> list[Updates]:
    """One update of every setting, of each of two data-parallel ranks."""
    cases = {name: Case(algorithm) for name, algorithm in (SETTINGS | KEPT | TWO_UPDATES).items()}
    return run_ranks(make_updates, 2, random_model, half_equal, {}, cases)


@pytest.fixture(scope="module")
def full_updates(random_model: Path, half_equal: Path) -> Updates:
    """The same where every response is computed, on one rank."""
    cases = {name: Case(a, zero_advantage="trained") for name, a in SETTINGS.items()}
    return run_ranks(make_updates, 1, random_model, half_equal, {}, cases)[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_bounds_and_gradients_are_those_of_the_whole_update(
    updates: list[Updates], full_updates: Updates, name: str
) -> None:
    full = full_updates[name]
    for rank in updates:
        update = rank[name]
        assert update["sums"]["packing_slots"] < 0.7 * full["sums"]["packing_slots"]
        assert update["sums"]["computed_tokens"] == update["sums"]["tokens"]
        assert update["sums"]["tokens"] < full["sums"]["tokens"]
        assert update["sums"]["unmasked_tokens"] == full["sums"]["tokens"]
        for decision, expected in zip(update["decisions"], full["decisions"], strict=True):
            # Shares are of log-probs from other micro-batches.
            assert decision == pytest.approx(expected, rel=1e-5)
        assert update["bounds"] == full["bounds"]
        assert update["loss"] == pytest.approx(full["loss"], abs=1e-6)
    assert_same_gradients(updates[0][name]["gradients"], full["gradients"])


@pytest.mark.parametrize("name", KEPT)
def test_what_may_need_them_has_them_computed(updates: list[Updates], name: str) -> None:
    sums = updates[0][name]["sums"]
    assert sums["tokens"] == sums["computed_tokens"] == sums["unmasked_tokens"]


@pytest.mark.parametrize("sizes", [{}, {"pipeline": 2}, {"context": 2}], ids=str)
def test_a_step_without_an_update_is_compared_with_the_engine_all_the_same(
    random_model: Path, half_equal: Path, tmp_path: Path, sizes: dict[str, int]
) -> None:
    batch = read_batch(half_equal)
    for group in batch.groups:
        for sample in group.samples:
            sample.reward = 1.0
    all_equal = tmp_path / half_equal.name
    write_batch(all_equal, batch)
    ranks = 2 if sizes else 1
    cases: dict[Any, Case] = {
        budget: Case({**NO_BONUS, "updates_per_batch": 2}, budget=budget) for budget in (512, 64)
    }
    anchored = {**NO_BONUS, "objective": f"{OWN}:Anchor", "updates_per_batch": 2}
    cases["trains all"] = Case(anchored, budget=512)
    equal = run_ranks(make_updates, ranks, random_model, all_equal, sizes, cases)
    trained = Case(NO_BONUS, budget=512, zero_advantage="trained")
    reference = run_ranks(make_updates, 1, random_model, half_equal, {}, {0: trained})[0][0]
    for rank in equal:
        assert rank[512]["skipped"] == [True, True]
        assert rank[512]["optimizer_steps"] == 0
        assert rank[512]["sums"]["mismatch_tokens"] == reference["sums"]["mismatch_tokens"] > 20
        measured = pytest.approx(reference["sums"]["mismatch_abs"], rel=1e-5)
        assert rank[512]["sums"]["mismatch_abs"] == measured
        largest = reference["maxima"]["mismatch/logprob_abs_max"]
        assert rank[512]["maxima"] == {"mismatch/logprob_abs_max": pytest.approx(largest, rel=1e-4)}
        assert rank["trains all"]["optimizer_steps"] == 2
        # A small micro-batch takes a part of the batch.
        part = rank[64]["sums"]["mismatch_tokens"]
        assert 0 < part < reference["sums"]["mismatch_tokens"]


def test_an_update_of_which_nothing_remains_is_skipped_on_every_rank(
    updates: list[Updates],
) -> None:
    for rank in updates:
        update = rank["two updates"]
        assert update["skipped"] == [False, True]
        assert update["optimizer_steps"] == 1
