"""Which checkpoints stay, what ``latest`` names, and in which order files reach the disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import _StorageInfo

from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.policy.checkpoint_files import (
    BestCheckpoint,
    CheckpointError,
    DamagedError,
    check_files,
    find_best,
    find_latest,
    name_best,
    piece_checksums,
    publish,
    read_state,
    remove_others,
    remove_unfinished,
    unfinished_directory,
)

FIELDS: dict[str, Any] = {
    "num_updates": 7,
    "layout": {"tensor": 1},
    "distributed_optimizer": True,
    "extra": {"a": [1, "ß"]},
}


def _save(root: Path, step: int, **config: Any) -> None:
    unfinished = unfinished_directory(root, step)
    unfinished.mkdir(parents=True)
    (unfinished / "__0_0.distcp").write_bytes(b"12345")
    publish(root, step, FIELDS, ["__0_0.distcp"])
    remove_others(root, step, CheckpointConfig(**config))


def _left(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_published_checkpoint_says_what_it_holds(tmp_path: Path) -> None:
    _save(tmp_path, 3)
    directory = find_latest(tmp_path)
    assert directory == tmp_path / "step_3"
    state = read_state(directory)
    assert (state.num_updates, state.layout, state.extra) == (7, {"tensor": 1}, {"a": [1, "ß"]})
    assert state.file_bytes == {"__0_0.distcp": 5}
    check_files(directory, state)


def test_hashing_can_be_stopped_between_two_pieces(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(bytes(20))
    places = [_StorageInfo("shard", offset, 10) for offset in (0, 10)]
    offsets = iter(["0"])

    def before_piece() -> None:
        if next(offsets, None) is None:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        piece_checksums(tmp_path, places, before_piece)
    assert list(piece_checksums(tmp_path, places)["shard"]) == ["0", "10"]


def test_the_newest_checkpoints_by_number_stay(tmp_path: Path) -> None:
    for step in (9, 10, 11):
        _save(tmp_path, step, keep_last=2)
    assert _left(tmp_path) == ["latest", "step_10", "step_11"]


def test_multiples_of_keep_every_stay_for_good(tmp_path: Path) -> None:
    for step in (5, 10, 12, 15, 20, 21, 22):
        _save(tmp_path, step, keep_last=2, keep_every=10)
    assert _left(tmp_path) == ["latest", "step_10", "step_20", "step_21", "step_22"]


def test_a_checkpoint_to_keep_for_good_is_also_one_of_the_newest(tmp_path: Path) -> None:
    for step in (8, 9, 10):
        _save(tmp_path, step, keep_last=2, keep_every=10)
    assert _left(tmp_path) == ["latest", "step_10", "step_9"]


def test_a_save_removes_no_checkpoint_of_a_higher_step(tmp_path: Path) -> None:
    for step in (2, 5, 6, 10):
        _save(tmp_path, step, keep_last=9)
    name_best(tmp_path, BestCheckpoint("step_6", "eval/sums/avg_at_k", 0.5))
    _save(tmp_path, 3, keep_last=1)
    assert find_latest(tmp_path) == tmp_path / "step_3"
    assert _left(tmp_path) == ["best", "latest", "step_10", "step_3", "step_5", "step_6"]


@pytest.mark.parametrize(
    ("kill", "bytes_left"),
    [("rename to .step_3.replaced.tmp", 5), ("rename to step_3", 5), ("remove", 7)],
)
def test_a_kill_while_a_checkpoint_of_the_same_number_is_replaced_leaves_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill: str, bytes_left: int
) -> None:
    _save(tmp_path, 3)
    rename, rmtree = Path.rename, shutil.rmtree

    def rename_or_die(self: Path, target: Path) -> Path:
        if kill == f"rename to {target.name}":
            raise KeyboardInterrupt
        return rename(self, target)

    def remove_or_die(path: Path, **options: Any) -> None:
        if kill == "remove" and path.exists():
            raise KeyboardInterrupt
        rmtree(path, **options)

    unfinished = unfinished_directory(tmp_path, 3)
    unfinished.mkdir()
    (unfinished / "__0_0.distcp").write_bytes(b"1234567")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename_or_die)
        patched.setattr(shutil, "rmtree", remove_or_die)
        with pytest.raises(KeyboardInterrupt):
            publish(tmp_path, 3, FIELDS, ["__0_0.distcp"])

    for _ in range(2):  # also after the next save has begun
        directory = find_latest(tmp_path)
        assert directory is not None
        check_files(directory, state := read_state(directory))
        assert state.file_bytes == {"__0_0.distcp": bytes_left}
        remove_unfinished(tmp_path)
    assert _left(tmp_path) == ["latest", "step_3"]


def test_a_file_that_another_rank_wrote_and_nobody_sees_is_named(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    unfinished = unfinished_directory(tmp_path, 2)
    unfinished.mkdir()
    with pytest.raises(OSError, match=r"^__1_0.distcp, which another rank wrote, is not there; "):
        publish(tmp_path, 2, FIELDS, ["__1_0.distcp"])
    assert find_latest(tmp_path) == tmp_path / "step_1"


def test_everything_is_flushed_before_the_rename_and_the_pointer_moves_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def name_of(descriptor: int) -> str:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(tmp_path.parent))

    def record_fsync(descriptor: int) -> None:
        events.append(f"flush {name_of(descriptor)}")
        fsync(descriptor)

    def record_rename(self: Path, target: Path) -> Path:
        events.append(f"rename to {target.name}")
        return rename(self, target)

    def record_replace(self: Path, target: Path) -> Path:
        events.append(f"replace {target.name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
    monkeypatch.setattr(Path, "replace", record_replace)
    _save(tmp_path, 3)

    root = tmp_path.name
    renamed, pointed = events.index("rename to step_3"), events.index("replace latest")
    flushed = {event.removeprefix("flush ") for event in events[:renamed] if "flush" in event}
    unfinished = f"{root}/.step_3.tmp"
    assert {unfinished, f"{unfinished}/__0_0.distcp", f"{unfinished}/state.json"} <= flushed
    assert f"flush {root}" in events[renamed:pointed]
    assert f"flush {root}" in events[pointed:]


def test_there_is_no_latest_checkpoint_before_the_first_save(tmp_path: Path) -> None:
    assert find_latest(tmp_path) is None
    assert find_latest(tmp_path / "never made") is None


@pytest.mark.parametrize("content", ["step_3\n", "../elsewhere\n", ""])
def test_a_pointer_to_nothing_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "latest").write_text(content)
    with pytest.raises(DamagedError, match=r"latest: (names step_3, which is not|holds '.*' inst)"):
        find_latest(tmp_path)


def test_the_best_checkpoint_stays_until_another_one_is_named(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    name_best(tmp_path, BestCheckpoint("step_1", "eval/sums/avg_at_k", 0.5))
    for step in (2, 3, 4):
        _save(tmp_path, step, keep_last=1)
    assert _left(tmp_path) == ["best", "latest", "step_1", "step_4"]
    name_best(tmp_path, BestCheckpoint("step_4", "eval/sums/avg_at_k", 0.625))
    _save(tmp_path, 5, keep_last=1)
    assert _left(tmp_path) == ["best", "latest", "step_4", "step_5"]
    assert find_best(tmp_path) == BestCheckpoint("step_4", "eval/sums/avg_at_k", 0.625)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("step_1", "damaged"),
        ('{"checkpoint": "step_9", "metric": "m", "value": 1}', "names 'step_9', which is not"),
        ('{"checkpoint": "../step_1", "metric": "m", "value": 1}', "which is not a checkpoint"),
    ],
)
def test_a_best_that_names_no_checkpoint_is_an_error_and_nothing_is_removed(
    tmp_path: Path, content: str, message: str
) -> None:
    for step in (1, 2):
        _save(tmp_path, step, keep_last=9)
    (tmp_path / "best").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        find_best(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        remove_others(tmp_path, 2, CheckpointConfig(keep_last=1))
    assert _left(tmp_path) == ["best", "latest", "step_1", "step_2"]
