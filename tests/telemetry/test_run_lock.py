"""Two processes and one run directory: one gets it, the other knows who has it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
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
    monkeypatch.setattr(run_lock, "_ENDING_S", 0)
    make_holder().hold(tmp_path)
    (tmp_path / ".lock").write_text(content)
    with pytest.raises(ValueError, match="run_dir") as caught, run_dir_locked(tmp_path, "train"):
        pass
    assert str(caught.value) == (
        f"{tmp_path}: in use by another process; wait until it ends, or choose another run_dir"
    )


@pytest.fixture
def killed() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has ended, and whose parent has not noticed."""
    with subprocess.Popen(["sleep", "60"]) as process:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        yield process


def _write_holder(run_dir: Path, *, pid: int, host: str = "") -> str:
    """Writes who holds the lock; returns how a line names it."""
    host = host or socket.gethostname()
    holder = {"command": "train", "pid": pid, "host": host, "start": "2026-11-01T12:00:00+00:00"}
    (run_dir / ".lock").write_text(json.dumps(holder) + "\n")
    return f"train, process {pid} on {host} since 2026-11-01 12:00:00 +0000"


@pytest.mark.parametrize(
    ("limit", "is_here", "is_live"),
    [
        ("_LIVE_S", True, True),
        ("_ENDING_S", True, False),
        ("_ELSEWHERE_S", False, True),
        ("_ELSEWHERE_S", False, False),
    ],
)
def test_how_long_a_start_waits_depends_on_whether_the_holder_can_still_end(
    make_holder: Callable[[], Holder],
    killed: subprocess.Popen[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    limit: str,
    is_here: bool,
    is_live: bool,
) -> None:
    for name in ("_LIVE_S", "_ENDING_S", "_ELSEWHERE_S"):
        monkeypatch.setattr(run_lock, name, 0.4 if name == limit else 0.0)
    make_holder().hold(tmp_path)
    name = _write_holder(
        tmp_path, pid=os.getpid() if is_live else killed.pid, host="" if is_here else "node7"
    )
    began_s = time.monotonic()
    with pytest.raises(ValueError, match="in use") as caught, run_dir_locked(tmp_path, "train"):
        pass
    assert time.monotonic() - began_s >= 0.4
    assert str(caught.value) == (
        f"{tmp_path}: in use by {name}; wait until it ends, or choose another run_dir"
    )
    line = f"{tmp_path}: in use by {name}; waiting for its end, at most 0.4 s\n"
    assert capsys.readouterr().err == ("" if limit == "_LIVE_S" else line)


def test_a_start_gets_the_lock_when_a_machine_that_has_died_loses_it(
    make_holder: Callable[[], Holder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run_lock, "_LIVE_S", 0.1)
    holder = make_holder()
    holder.hold(tmp_path)
    name = _write_holder(tmp_path, pid=3, host="node7")
    timer = threading.Timer(0.5, holder.process.kill)
    timer.start()
    with run_dir_locked(tmp_path, "train"):
        assert f'"pid": {os.getpid()}' in (tmp_path / ".lock").read_text()
    assert capsys.readouterr().err == (
        f"{tmp_path}: in use by {name}; waiting for its end, at most 120 s\n"
    )


def test_a_process_is_live_until_it_is_killed_or_unknown(
    killed: subprocess.Popen[bytes],
) -> None:
    assert run_lock._is_live(os.getpid())
    assert not run_lock._is_live(killed.pid)
    assert not run_lock._is_live(2**22 + 1)  # more than Linux gives


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
