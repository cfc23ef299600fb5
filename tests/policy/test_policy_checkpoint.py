"""Checkpoints: resuming, other layouts, kills, damage."""

from __future__ import annotations

import signal
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from bapo_megatron.policy.checkpoint import CheckpointError, find_latest
from tests.distributed_launch import run_ranks, run_to_exit
from tests.policy import checkpoint_ranks
from tests.policy.tiny_models import make_model

pytestmark = pytest.mark.distributed

RESUMED = (
    "single from single",
    "tensor from tensor",
    "data from data",
    "tensor from data",
    "data from tensor",
    "single from tensor",
    "single from data",
)
KILLED_AT = ("while Megatron writes", "before the rename", "before the pointer moves")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    make_model("qwen2", root / "qwen2")
    make_model("qwen3", root / "qwen3")
    make_model("qwen2", root / "wide", intermediate_size=64)
    return {name: root / name for name in ("qwen2", "qwen3", "wide")}


@pytest.fixture(scope="module")
def results(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any]]:
    """Results by name, one entry per rank."""
    root = tmp_path_factory.mktemp("checkpoints")
    two = run_ranks(checkpoint_ranks.two_ranks, 2, models["qwen2"], root)
    (one,) = run_ranks(checkpoint_ranks.one_rank, 1, models, root)
    return {**{name: [rank[name] for rank in two] for name in two[0]}, **{k: [one[k]] for k in one}}


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_updates_equal_those_of_an_uninterrupted_run(
    results: dict[str, list[Any]], name: str
) -> None:
    expected = results[name.split(" from ")[0]][0]["weights"]
    for rank in results[name]:
        assert len(rank["weights"]) == len(expected) == 4
        for update, (resumed, uninterrupted) in enumerate(
            zip(rank["weights"], expected, strict=True), start=1
        ):
            for key, tensor in uninterrupted.items():
                assert (resumed[key] - tensor).abs().max() < 1e-6, (update, key)


@pytest.mark.parametrize("layout", ["tensor", "data"])
def test_four_updates_do_not_depend_on_the_layout(
    results: dict[str, list[Any]], layout: str
) -> None:
    for rank in results[layout]:
        for own, single in zip(rank["weights"], results["single"][0]["weights"], strict=True):
            assert max(float((own[key] - single[key]).abs().max()) for key in single) < 1e-5


def test_updates_move_the_weights_far_beyond_the_tolerances(results: dict[str, list[Any]]) -> None:
    weights = results["single"][0]["weights"]
    for before, after in pairwise(weights):
        assert (after["lm_head.weight"] - before["lm_head.weight"]).abs().max() > 1e-3


@pytest.mark.parametrize("name", RESUMED)
def test_state_of_caller_and_schedule_come_back(results: dict[str, list[Any]], name: str) -> None:
    for rank in results[name]:
        assert rank["extra"] == checkpoint_ranks.EXTRA
        assert rank["num_updates"] == 1
        assert rank["lr"] == pytest.approx(0.006)  # 0.01 · (1 − 4 / 10)


@pytest.mark.parametrize("layout", ["single", "tensor", "data"])
def test_random_streams_continue_in_the_layout_that_saved_them(
    results: dict[str, list[Any]], layout: str
) -> None:
    saved = [rank["drawn"] for rank in results[layout]]
    resumed = [rank["drawn"] for rank in results[f"{layout} from {layout}"]]
    for (number, tensor), (same_number, same_tensor) in zip(saved, resumed, strict=True):
        assert number == same_number
        assert torch.equal(tensor, same_tensor)


def test_bfloat16_resumes_with_its_master_weights(results: dict[str, list[Any]]) -> None:
    (run,) = results["bfloat16"]
    assert len(run["resumed"]) == 3
    for resumed, uninterrupted in zip(run["resumed"], run["uninterrupted"], strict=True):
        assert all(torch.equal(resumed[key], uninterrupted[key]) for key in uninterrupted)


def test_only_the_last_checkpoints_are_kept(results: dict[str, list[Any]]) -> None:
    assert results["kept"] == [["latest", "step_10", "step_11"]]


def test_checkpoints_of_an_abandoned_try_make_room_for_the_one_just_saved(
    results: dict[str, list[Any]],
) -> None:
    assert results["kept_after_abandoned"] == [["latest", "step_2", "step_3"]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("truncated", ".distcp has "),
        ("missing", ".distcp is missing"),
        ("no state", "not a complete checkpoint, state.json is missing"),
        ("bad state", "state.json: damaged"),
        ("format", "format 99, this version reads format 1"),
        ("other model", "cannot be loaded into this model"),
        ("other width", "cannot be loaded into this model"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    results: dict[str, list[Any]], name: str, message: str
) -> None:
    (error,) = (errors[name] for errors in results["errors"])
    assert message in error
    assert "\n" not in error


def test_a_full_disk_is_reported_and_leaves_the_last_checkpoint(
    results: dict[str, list[Any]],
) -> None:
    (run,) = results["disk_full"]
    assert "step_2" in run["error"]
    assert "File too large" in run["error"]
    assert "export" in run["export_error"]
    assert run["extra"] == {"saved": 1}
    assert not run["exported"]


def _started_by_ranks(scratch: Path) -> list[psutil.Process]:
    """Processes that ranks started, also those that have lost their parent since."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TEST_SCRATCH") == str(scratch):
                found.append(process)
    return found


def test_a_kill_while_saving_leaves_the_last_checkpoint_loadable_and_no_process(
    models: dict[str, Path], tmp_path: Path
) -> None:
    roots = [tmp_path / moment for moment in KILLED_AT]
    for moment, root in zip(KILLED_AT, roots, strict=True):
        codes = run_to_exit(
            checkpoint_ranks.save_killed_at, 1, moment, models["qwen2"], root, scratch=tmp_path
        )
        assert codes == [-signal.SIGKILL]
        assert not psutil.wait_procs(_started_by_ranks(tmp_path), timeout=10)[1]
        latest = find_latest(root)
        assert latest is not None
        assert latest.name == "step_1"

    (continued,) = run_ranks(checkpoint_ranks.continue_after_kill, 1, models["qwen2"], roots)

    assert continued == [
        {"loaded": "step_1", "extra": {"saved": 1}, "left": ["latest", "step_2"]}
    ] * len(roots)


def test_there_is_no_latest_checkpoint_before_the_first_save(tmp_path: Path) -> None:
    assert find_latest(tmp_path) is None
    assert find_latest(tmp_path / "never made") is None


@pytest.mark.parametrize("content", ["step_3\n", "../elsewhere\n", ""])
def test_a_pointer_to_nothing_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "latest").write_text(content)
    with pytest.raises(CheckpointError, match="not a checkpoint beside it"):
        find_latest(tmp_path)
