"""Saves that are killed or fail, damaged checkpoints, and what a background writer may not do."""

from __future__ import annotations

import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.distributed_launch import run_ranks, run_to_exit
from tests.policy import checkpoint_fault_ranks as ranks
from tests.policy.tiny_models import make_model

pytestmark = pytest.mark.distributed

MODES = ("synchronous", "asynchronous")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen2": make_model("qwen2", root / "qwen2"),
        "qwen3": make_model("qwen3", root / "qwen3"),
        "wide": make_model("qwen2", root / "wide", intermediate_size=64),
        "deep": make_model("qwen2", root / "deep", num_hidden_layers=3),
    }


@pytest.fixture(scope="module")
def killed(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root, scratch = tmp_path_factory.mktemp("killed"), tmp_path_factory.mktemp("scratch")
    codes = run_to_exit(ranks.killed_saves, 1, models["qwen2"], root, scratch=scratch)
    assert codes == [0], (scratch / "error_0").read_text()
    assert _started_by_ranks(scratch) == []
    return torch.load(scratch / "result_0", weights_only=False)


@pytest.fixture(scope="module")
def killed_peer(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two ranks, of which one was killed while saving the second."""
    root, scratch = tmp_path_factory.mktemp("peer"), tmp_path_factory.mktemp("scratch")
    codes = run_to_exit(ranks.killed_peer, 2, models["qwen2"], root, scratch=scratch)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] != 0
    assert _started_by_ranks(scratch) == []
    assert [path.name for path in root.glob(".step_*.tmp")] == [".step_2.tmp"]
    return root


@pytest.fixture(scope="module")
def two_ranks(
    models: dict[str, Path], killed_peer: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    return run_ranks(ranks.two_ranks, 2, models, tmp_path_factory.mktemp("faults"), killed_peer)


@pytest.fixture(scope="module")
def delayed(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (result,) = run_ranks(
        ranks.delayed_writers, 1, models["qwen2"], tmp_path_factory.mktemp("delayed")
    )
    return result


def _started_by_ranks(scratch: Path) -> list[psutil.Process]:
    """Processes that ranks started, also those that have lost their parent since."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TEST_SCRATCH") == str(scratch):
                found.append(process)
    return psutil.wait_procs(found, timeout=10)[1]


@pytest.mark.parametrize("moment", [moment for moment, _ in ranks.KILLED])
def test_after_a_kill_the_last_complete_checkpoint_loads_and_the_next_save_tidies_up(
    killed: dict[str, Any], moment: str
) -> None:
    last = 2 if moment == ranks.LATE else 1
    assert killed[moment] == {
        "code": -signal.SIGKILL,
        "loaded": f"step_{last}",
        "extra": {"saved": last},
        "left": ["latest", "step_3"],
    }


def test_when_a_rank_is_killed_in_its_writer_the_checkpoint_before_loads_on_all_ranks(
    two_ranks: list[dict[str, Any]],
) -> None:
    for rank in two_ranks:
        assert rank["killed"] == {
            "loaded": "step_1",
            "extra": {"saved": 1},
            "left": ["latest", "step_3"],
        }


def test_a_rank_that_is_killed_while_it_reads_is_not_taken_for_damage(
    models: dict[str, Path], killed_peer: Path, tmp_path: Path
) -> None:
    codes = run_to_exit(ranks.killed_reader, 2, models["qwen2"], killed_peer, scratch=tmp_path)
    assert codes[1] == -signal.SIGKILL
    assert "LostPeerError: another rank ended" in (tmp_path / "error_0").read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("truncated", "damaged, __1_0.distcp has "),
        ("scrambled shards", "damaged, __1_0.distcp has changed since it was written, in the "),
        ("scrambled description", "damaged, metadata.json has changed since it was written"),
        ("scrambled metadata", "damaged, .metadata has changed since it was written"),
        ("scrambled rank file", "damaged, rng_1.pt has changed since it was written"),
        ("flipped bit", "_0.distcp has changed since it was written, in the "),
        ("shards without checksums", "damaged, checksums.json has no checksum of __1_0.distcp for"),
        ("unreadable checksums", "damaged, checksums.json cannot be read ("),
        ("crafted metadata", "damaged, .metadata names posix.mkdir, which no checkpoint needs"),
        ("crafted object", "damaged, a file names posix.mkdir, which no checkpoint needs"),
        (
            "crafted common part",
            "common.pt: not part of the checkpoint, and Megatron would load it",
        ),
        ("crafted rank file", "rng_0.pt: damaged (a file is damaged)"),
        ("shards outside", "damaged, .metadata names '../step_1/__"),
        ("missing shards", "damaged, __1_0.distcp is missing instead of "),
        ("missing rank file", "damaged, rng_1.pt is missing instead of "),
        ("missing metadata", "damaged, .metadata is missing instead of "),
        ("no state", "damaged, state.json is missing"),
        ("unreadable state", "damaged, state.json cannot be read (not UTF-8"),
        ("state of nothing", "damaged, state.json cannot be read (must be an object, got [])"),
        ("state without a field", "damaged, state.json cannot be read ("),
        ("another number", "damaged, state.json has changed since it was written"),
        ("earlier format", "format 5, this version reads format 6; resume with bapo-megatron 0.1"),
        ("other model", "cannot be loaded into this model"),
        ("other width", "cannot be loaded into this model"),
        ("other depth", "cannot be loaded into this model"),
        ("other optimizer", "resume with megatron.distributed_optimizer: true"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_line_by_every_rank(
    two_ranks: list[dict[str, Any]], name: str, message: str
) -> None:
    first, second = (rank["damage"]["errors"][name] for rank in two_ranks)
    assert message in first, first
    assert "step_2" in first
    if "damaged" in first:
        assert re.search(r"write step_1 into /.+/latest to continue from there$", first)
    else:
        remedy = "; delete the file" if name == "crafted common part" else "; resume with "
        assert remedy in first
    assert "\n" not in first
    if name == "scrambled metadata":  # rank 0 compares it with its checksum, both read it
        assert ".metadata cannot be read (" in second
    elif name == "scrambled rank file":
        assert "rng_1.pt: damaged (a file is damaged)" in second
    else:
        errors = {error.removeprefix("another rank: ") for error in (first, second)}
        assert len(errors) == 1


def test_damage_that_one_replica_finds_is_reported_by_all_of_them(
    two_ranks: list[dict[str, Any]],
) -> None:
    errors = sorted(rank["damage of one"] for rank in two_ranks)
    assert errors[1] == f"another rank: {errors[0]}"
    assert "step_1: cannot be loaded into this model (" in errors[0]


def test_nothing_that_a_crafted_checkpoint_holds_is_run(two_ranks: list[dict[str, Any]]) -> None:
    assert [rank["damage"]["executed"] for rank in two_ranks] == [[], []]


def test_without_checksums_a_flipped_bit_loads_silently(two_ranks: list[dict[str, Any]]) -> None:
    # Else the test that finds it would prove nothing.
    errors = [rank["damage"]["errors"]["flipped bit without checksums"] for rank in two_ranks]
    assert errors == ["no error", "no error"]


def test_the_checkpoint_before_a_damaged_one_loads_on_all_ranks(
    two_ranks: list[dict[str, Any]],
) -> None:
    assert [rank["damage"]["previous"] for rank in two_ranks] == [{"saved": 1}] * 2


@pytest.mark.parametrize("mode", MODES)
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
    two_ranks: list[dict[str, Any]], fault: str, message: str, mode: str
) -> None:
    for rank in two_ranks:
        error = rank["disk full"]["errors"][f"{fault}, {mode}"]
        assert message in error
        assert "step_2: " in error
        assert "the last complete checkpoint is untouched" in error
        assert "\n" not in error


def test_after_a_full_disk_the_checkpoint_before_loads_and_saving_works_again(
    two_ranks: list[dict[str, Any]],
) -> None:
    for rank in two_ranks:
        assert rank["disk full"]["loaded"] == ("step_1", {"saved": 1})
        assert rank["disk full"]["left"] == ["latest", "step_2"]


@pytest.mark.parametrize("optimizer", ["distributed", "plain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_during_a_background_save_do_not_reach_its_files(
    delayed: dict[str, Any], dtype: str, optimizer: str
) -> None:
    uninterrupted, resumed = delayed["unchanged"][f"{dtype}, {optimizer} optimizer"]
    assert len(resumed) == len(uninterrupted) == 2
    for after, expected in zip(resumed, uninterrupted, strict=True):
        assert all(torch.equal(after[key], expected[key]) for key in expected)


def test_a_background_save_appears_when_a_poll_finds_it_complete(delayed: dict[str, Any]) -> None:
    assert delayed["polled"] == {"before": [".step_1.tmp"], "after": ["latest", "step_1"]}


def test_a_save_waits_for_the_one_before_it(delayed: dict[str, Any]) -> None:
    assert delayed["one at a time"] == ["step_1", "latest", "step_1", "step_2"]


def test_closing_stops_the_writer_and_leaves_nothing_under_a_valid_name(
    delayed: dict[str, Any],
) -> None:
    assert delayed["closed"] == {
        "threads": [],
        "left": [".step_1.tmp"],
        "later": ["latest", "step_2"],
    }


def test_an_error_of_the_background_writer_is_raised_by_the_next_poll(
    delayed: dict[str, Any],
) -> None:
    failed = delayed["failed"]
    assert "step_2" in failed["error"]
    assert "File too large" in failed["error"]
    assert failed["extra"] == {"saved": 1}
    assert failed["same"]
    assert failed["left"] == ["latest", "step_1", "step_3"]
