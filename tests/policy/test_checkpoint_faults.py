"""Saves that are killed or fail, damaged checkpoints, and what a background writer may not do."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.distributed_launch import run_ranks, run_to_exit
from tests.policy import checkpoint_fault_ranks as ranks
from tests.policy.checkpoint_damages import WORDS
from tests.policy.convert_models import assert_same
from tests.policy.tiny_models import Models, Ranks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def killed_peer(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two ranks, of which one was killed while saving the second."""
    root, scratch = tmp_path_factory.mktemp("peer"), tmp_path_factory.mktemp("scratch")
    codes = run_to_exit(ranks.killed_peer, 2, models["qwen2"], root, scratch=scratch)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] != 0
    assert [path.name for path in root.glob(".step_*.tmp")] == [".step_2.tmp"]
    return root


@pytest.fixture(scope="module")
def two_ranks(models: Models, killed_peer: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    two = {name: models[name] for name in ("qwen2", "qwen3")}
    return run_ranks(ranks.two_ranks, 2, two, tmp_path_factory.mktemp("faults"), killed_peer)


@pytest.fixture(scope="module")
def delayed(models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    root = tmp_path_factory.mktemp("delayed")
    return run_ranks(ranks.delayed_writers, 1, models["qwen2"], root)[0]


def test_when_a_rank_is_killed_in_its_writer_the_checkpoint_before_loads_on_all_ranks(
    two_ranks: Ranks,
) -> None:
    expected = {"loaded": "step_1", "extra": {"saved": 1}, "left": ["latest", "step_3"]}
    assert [rank["killed"] for rank in two_ranks] == [expected] * 2


def test_a_rank_that_is_killed_while_it_reads_is_not_taken_for_damage(
    models: Models, killed_peer: Path, tmp_path: Path
) -> None:
    codes = run_to_exit(ranks.killed_reader, 2, models["qwen2"], killed_peer, scratch=tmp_path)
    assert codes[1] == -signal.SIGKILL
    assert "LostPeerError: another rank exited" in (tmp_path / "error_0").read_text()


REFUSALS = WORDS | {"other model": "cannot be loaded into this model"}
OTHERWISE_ON_RANK_1 = {
    "scrambled metadata": ".metadata cannot be read",  # rank 0 compares it with its checksum first
    "scrambled rank file": "rng_1.pt cannot be read",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_line_by_every_rank(
    two_ranks: Ranks, name: str
) -> None:
    first, second = (rank["damage"]["errors"][name] for rank in two_ranks)
    assert re.search(REFUSALS[name], first), first
    assert "step_2" in first
    if "damaged, " in first:
        assert re.search(r"write step_1 into /.+/latest to continue from there$", first)
    else:
        remedy = "; delete the file" if name == "crafted common part" else "; resume with "
        assert remedy in first
    assert "\n" not in first
    if name in OTHERWISE_ON_RANK_1:
        assert OTHERWISE_ON_RANK_1[name] in second
    else:
        assert len({error.replace("another rank: ", "") for error in (first, second)}) == 1


def test_damage_that_one_replica_finds_is_reported_by_all_of_them(two_ranks: Ranks) -> None:
    errors = [rank["damage of one"] for rank in two_ranks]
    assert sorted("another rank: " in error for error in errors) == [False, True]
    assert len({error.replace("another rank: ", "") for error in errors}) == 1
    assert "step_1: cannot be loaded into this model (" in errors[0]


def test_nothing_that_a_crafted_checkpoint_holds_is_run(two_ranks: Ranks) -> None:
    assert [rank["damage"]["executed"] for rank in two_ranks] == [[], []]


def test_without_checksums_a_flipped_bit_loads_silently(two_ranks: Ranks) -> None:
    # Else the test that finds it would prove nothing.
    errors = [rank["damage"]["errors"][ranks.UNVERIFIED] for rank in two_ranks]
    assert errors == ["no error", "no error"]


def test_the_checkpoint_before_a_damaged_one_loads_on_all_ranks(two_ranks: Ranks) -> None:
    assert [rank["damage"]["previous"] for rank in two_ranks] == [{"saved": 1}] * 2


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (f"rank 1, {ranks.SHARD_LIMIT_BYTES} bytes", "File too large"),
        ("rank 0, 100 bytes", "File too large"),
        ("rank 1, 100 bytes", "File too large"),
        ("metadata", "No space left on device"),
        ("rollout", "No space left on device"),
        ("not shared", "put run_dir on a file system that all nodes share"),
    ],
)
def test_a_full_disk_on_one_rank_is_reported_in_one_line_by_every_rank(
    two_ranks: Ranks, fault: str, message: str, mode: str
) -> None:
    for rank in two_ranks:
        error = rank["disk full"]["errors"][f"{fault}, {mode}"]
        assert message in error
        assert "step_2: " in error
        assert "the last complete checkpoint is untouched" in error
        assert "\n" not in error


def test_after_a_full_disk_the_checkpoint_before_loads_and_saving_works_again(
    two_ranks: Ranks,
) -> None:
    for rank in two_ranks:
        assert rank["disk full"]["loaded"] == ("step_1", {"saved": 1})
        assert rank["disk full"]["left"] == ["latest", "step_2"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_during_a_background_save_do_not_reach_its_files(
    delayed: dict[Any, Any], dtype: str
) -> None:
    uninterrupted, resumed = delayed[dtype]
    assert len(resumed) == len(uninterrupted) == 2
    for after, expected in zip(resumed, uninterrupted, strict=True):
        assert_same(after, expected)


def test_a_background_save_appears_when_a_poll_finds_it_complete(delayed: dict[Any, Any]) -> None:
    assert delayed["_polled"] == {"before": [".step_1.tmp"], "after": ["latest", "step_1"]}


def test_a_save_waits_for_the_one_before_it(delayed: dict[Any, Any]) -> None:
    assert delayed["_one_at_a_time"] == ["step_1", "latest", "step_1", "step_2"]


def test_closing_stops_the_writer_and_leaves_nothing_under_a_valid_name(
    delayed: dict[Any, Any],
) -> None:
    left = {"threads": [], "left": [".step_1.tmp"], "later": ["latest", "step_2"]}
    assert delayed["_closed"] == left


def test_an_error_of_the_background_writer_is_raised_by_the_next_poll(
    delayed: dict[Any, Any],
) -> None:
    failed = delayed["_failed"]
    assert re.search("step_2.*File too large", failed["error"])
    assert failed["left"] == ["latest", "step_1", "step_3"]
