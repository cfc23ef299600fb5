"""Which checkpoints stay, what ``latest`` names, and in which order files reach the disk."""

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.policy.checkpoint_files import (
    BestCheckpoint,
    CheckpointError,
    check_complete,
    check_files,
    find_best,
    find_latest,
    name_best,
    publish,
    read_state,
    remove_others,
    remove_unfinished,
    step_name,
    unfinished_directory,
)
from tests.policy.small_checkpoints import FIELDS, left, save_small


def test_a_published_checkpoint_says_what_it_holds(tmp_path: Path) -> None:
    directory = save_small(tmp_path, 3)
    assert find_latest(tmp_path) == directory == tmp_path / "step_3"
    state = read_state(directory)
    assert (state.num_updates, state.layout, state.extra) == (7, {"tensor": 1}, {"a": [1, "ß"]})
    assert (state.file_bytes["__0_0.distcp"], state.file_bytes["rng_0.pt"]) == (17, 22)
    check_files(directory, state)


@pytest.mark.parametrize(
    ("config", "steps", "expected"),
    [
        ({"keep_last": 2}, (9, 10, 11), ["step_10", "step_11"]),
        (
            {"keep_last": 2, "keep_every": 10},
            (5, 10, 12, 15, 20, 21, 22),
            ["step_10", "step_20", "step_21", "step_22"],
        ),
        # One to keep for good is also one of the newest.
        ({"keep_last": 2, "keep_every": 10}, (8, 9, 10), ["step_10", "step_9"]),
    ],
)
def test_the_newest_checkpoints_by_number_stay_and_multiples_of_keep_every_for_good(
    tmp_path: Path, config: dict[str, int], steps: tuple[int, ...], expected: list[str]
) -> None:
    for step in steps:
        save_small(tmp_path, step, **config)
    assert left(tmp_path) == ["latest", *expected]


def test_a_save_removes_no_checkpoint_of_a_higher_step(tmp_path: Path) -> None:
    for step in (2, 5, 6, 10):
        save_small(tmp_path, step)
    name_best(tmp_path, BestCheckpoint("step_6", "eval/sums/avg_at_k", 0.5))
    save_small(tmp_path, 3, keep_last=1)
    assert find_latest(tmp_path) == tmp_path / "step_3"
    assert left(tmp_path) == ["best", "latest", "step_10", "step_3", "step_5", "step_6"]


@contextmanager
def _killed_at(number: int) -> Iterator[None]:
    """Die before the call of this number that changes the disk."""
    calls = itertools.count()

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def die_or_call(*args: Any, **options: Any) -> Any:
            if next(calls) == number:
                raise KeyboardInterrupt
            return call(*args, **options)

        return die_or_call

    with ExitStack() as stack:
        for place, names in ((Path, ("mkdir", "rename", "replace")), (shutil, ("rmtree",))):
            for name in names:
                stack.enter_context(mock.patch.object(place, name, dying(getattr(place, name))))
        yield


@pytest.mark.parametrize("step", [2, 1], ids=["new", "replaced"])
def test_a_kill_at_any_moment_of_a_save_leaves_a_complete_checkpoint_and_the_next_save_tidies_up(
    tmp_path: Path, step: int
) -> None:
    names = []
    for number in itertools.count():
        root = tmp_path / str(number)
        save_small(root, 1)
        with suppress(KeyboardInterrupt), _killed_at(number):
            save_small(root, step, keep_last=1)
            break
        for _ in range(2):  # also after the next save has begun
            directory = find_latest(root)
            assert directory is not None
            check_complete(directory)
            remove_unfinished(root)
        names.append(step_name(directory))
        save_small(root, 3, keep_last=1)
        assert left(root) == ["latest", "step_3"]
    assert names == sorted(names)
    assert {*names} == {"step_1", f"step_{step}"}
    assert len(names) > 9


def test_a_file_that_another_rank_wrote_and_nobody_sees_is_named(tmp_path: Path) -> None:
    save_small(tmp_path, 1)
    unfinished = unfinished_directory(tmp_path, 2)
    unfinished.mkdir()
    with pytest.raises(OSError, match=r"^__1_0.distcp"):
        publish(tmp_path, 2, FIELDS, ["__1_0.distcp"])
    assert find_latest(tmp_path) == tmp_path / "step_1"


def test_everything_is_flushed_before_the_rename_and_the_pointer_moves_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def recorded(call: Callable[..., Any], name_of: Callable[..., str]) -> Callable[..., Any]:
        def record(*args: Any) -> Any:
            events.append(name_of(*args))
            return call(*args)

        return record

    def flushed_name(descriptor: int) -> str:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        return f"flush {path.relative_to(tmp_path.parent)}"

    monkeypatch.setattr(os, "fsync", recorded(os.fsync, flushed_name))
    for name in ("rename", "replace"):
        call = recorded(getattr(Path, name), lambda _, target, name=name: f"{name} {target.name}")
        monkeypatch.setattr(Path, name, call)
    save_small(tmp_path, 3)

    root = tmp_path.name
    renamed, pointed = events.index("rename step_3"), events.index("replace latest")
    flushed = {event.removeprefix("flush ") for event in events[:renamed] if "flush" in event}
    unfinished = f"{root}/.step_3.tmp"
    assert {unfinished, f"{unfinished}/__0_0.distcp", f"{unfinished}/state.json"} <= flushed
    assert f"flush {root}" in events[renamed:pointed]
    assert f"flush {root}" in events[pointed:]


def test_the_best_checkpoint_stays_until_another_one_is_named(tmp_path: Path) -> None:
    save_small(tmp_path, 1)
    name_best(tmp_path, BestCheckpoint("step_1", "eval/sums/avg_at_k", 0.5))
    for step in (2, 3, 4):
        save_small(tmp_path, step, keep_last=1)
    assert left(tmp_path) == ["best", "latest", "step_1", "step_4"]
    name_best(tmp_path, BestCheckpoint("step_4", "eval/sums/avg_at_k", 0.625))
    save_small(tmp_path, 5, keep_last=1)
    assert left(tmp_path) == ["best", "latest", "step_4", "step_5"]
    assert find_best(tmp_path) == BestCheckpoint("step_4", "eval/sums/avg_at_k", 0.625)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("step_1", "JSON"),
        ('{"checkpoint": "step_9", "metric": "m", "value": 1}', "'step_9'"),
        ('{"checkpoint": "../step_1", "metric": "m", "value": 1}', "'../step_1'"),
    ],
)
def test_a_best_that_names_no_checkpoint_is_an_error_and_nothing_is_removed(
    tmp_path: Path, content: str, message: str
) -> None:
    for step in (1, 2):
        save_small(tmp_path, step)
    (tmp_path / "best").write_text(content)
    for read in (find_best, lambda root: remove_others(root, 2, CheckpointConfig(keep_last=1))):
        with pytest.raises(CheckpointError, match=rf"/best: damaged \(.*{message}"):
            read(tmp_path)
    assert left(tmp_path) == ["best", "latest", "step_1", "step_2"]
