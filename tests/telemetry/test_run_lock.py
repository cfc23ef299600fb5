"""Two processes and one run directory: one gets it, the other knows who has it."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, NoReturn

import pytest

from bapo_megatron.telemetry import run_lock
from bapo_megatron.telemetry.run_lock import run_dir_locked
from tests.launch import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Holder:
    """A process of ``lock_holder``."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.telemetry.lock_holder"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def hold(self, run_dir: Path) -> int:
        """Returns the id of a fork that lives on."""
        self.tell(f"0 {run_dir}")
        word, child_pid = self.said().split()
        assert word == "holds"
        return int(child_pid)


@pytest.fixture
def make_holder() -> Iterator[Callable[[], Holder]]:
    holders: list[Holder] = []

    def make() -> Holder:
        holders.append(Holder())
        return holders[-1]

    yield make
    for holder in holders:
        os.killpg(holder.process.pid, signal.SIGKILL)  # its forks, too
        holder.process.wait()


def test_of_two_starts_one_wins_and_the_other_names_it(
    make_holder: Callable[[], Holder], tmp_path: Path
) -> None:
    holders = [make_holder(), make_holder()]
    draw = random.Random(7)
    winners = set()
    for _ in range(20):
        for holder in holders:
            holder.tell(f"{draw.uniform(0, 0.005)} {tmp_path}")
        answers = [holder.said() for holder in holders]
        (winner,) = (i for i, answer in enumerate(answers) if answer.startswith("holds "))
        assert re.fullmatch(
            rf"{tmp_path}: in use by train, process {holders[winner].process.pid} on \S+ since "
            r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}; wait until it ends, or choose another "
            "run_dir",
            answers[1 - winner],
        )
        holders[winner].tell("")
        winners.add(winner)
    assert winners == {0, 1}


def test_the_kernel_releases_what_a_killed_process_held_although_its_fork_lives(
    make_holder: Callable[[], Holder], tmp_path: Path
) -> None:
    holder = make_holder()
    child_pid = holder.hold(tmp_path)
    with pytest.raises(ValueError, match="in use by train"), run_dir_locked(tmp_path, "eval"):
        pass
    holder.process.kill()
    with run_dir_locked(tmp_path, "eval"):
        os.kill(child_pid, 0)
        assert '"command": "eval"' in (tmp_path / ".lock").read_text()


def test_a_link_to_a_run_directory_is_the_same_one(
    make_holder: Callable[[], Holder], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    make_holder().hold(tmp_path / "link")
    message = f"^{tmp_path}/run: in use by train, process"
    with pytest.raises(ValueError, match=message), run_dir_locked(tmp_path / "run", "train"):
        pass


@pytest.mark.parametrize("content", ["", "\x00\x1b", "[", "null", '{"pid": 3}', '{"pid": "x"'])
def test_a_holder_whose_line_is_damaged_is_another_process(
    make_holder: Callable[[], Holder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: str,
) -> None:
    monkeypatch.setattr(run_lock, "_RETRY_S", 0)
    make_holder().hold(tmp_path)
    (tmp_path / ".lock").write_text(content)
    with pytest.raises(ValueError, match="run_dir") as caught, run_dir_locked(tmp_path, "train"):
        pass
    assert str(caught.value) == (
        f"{tmp_path}: in use by another process; wait until it ends, or choose another run_dir"
    )


def test_a_file_system_without_locks_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with run_dir_locked(tmp_path, "train"):
        pass
    assert capsys.readouterr().err == (
        f"{tmp_path}: its file system has no locks; do not start two runs in it\n"
    )
