"""A run directory: one process gets it, another one knows who has it; and its starts."""

import errno
import fcntl
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import pytest

from bapo_megatron import __version__
from bapo_megatron.telemetry import run_dir
from bapo_megatron.telemetry.run_dir import read_starts, record_start, run_dir_locked
from tests.launch import REPOSITORY

MakeHolder = Callable[[], Any]

HOLDER = """
import os, sys, time
from pathlib import Path
from bapo_megatron.telemetry import run_dir
run_dir._LIVE_WAIT_S = 0.3
for line in sys.stdin:
    delay_s, path = line.split()
    time.sleep(float(delay_s))
    try:
        with run_dir.run_dir_locked(Path(path), "train"):
            child_pid = os.fork()
            if not child_pid:
                time.sleep(60)
                os._exit(0)
            print("holds", child_pid, flush=True)
            sys.stdin.readline()
    except ValueError as error:
        print(error, flush=True)
"""
"""Takes the lock of each directory that it reads, after a delay, and holds it until the next line,
while a fork of it lives on."""


@pytest.fixture
def make_holder() -> Iterator[MakeHolder]:
    """Starts a process of ``HOLDER``."""
    holders: list[Any] = []

    def make() -> Any:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        holders.append(process)
        return process

    yield make
    for holder in holders:
        os.killpg(holder.pid, signal.SIGKILL)  # its forks, too
        holder.wait()


def hold(holder: Any, path: Path) -> int:
    """Have a process take the lock; returns the id of its fork."""
    print(0, path, file=holder.stdin)
    word, child_pid = holder.stdout.readline().split()
    assert word == "holds"
    return int(child_pid)


def refusal(path: Path) -> str:
    with pytest.raises(ValueError, match="in use") as caught, run_dir_locked(path, "eval"):
        pass
    return str(caught.value)


def test_of_two_starts_one_wins_and_the_other_names_it(
    make_holder: MakeHolder, tmp_path: Path
) -> None:
    holders = [make_holder(), make_holder()]
    draw = random.Random(7)
    for _ in range(20):
        for holder in draw.sample(holders, 2):
            print(draw.uniform(0, 0.005), tmp_path, file=holder.stdin)
        answers = [holder.stdout.readline() for holder in holders]
        (winner,) = (i for i, answer in enumerate(answers) if answer.startswith("holds "))
        assert re.match(
            rf"{tmp_path}: in use by train, process {holders[winner].pid} on \S+ since "
            r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}; ",
            answers[1 - winner],
        )
        print(file=holders[winner].stdin)


def test_the_kernel_releases_what_a_killed_process_held_although_its_fork_lives(
    make_holder: MakeHolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    holder = make_holder()
    child_pid = hold(holder, tmp_path / "link")
    assert refusal(tmp_path / "run").startswith(f"{tmp_path}/run: in use by train, process")
    (tmp_path / "run" / ".lock").write_text("node7 3\ntrain, process 3\n")  # it may be far away
    threading.Timer(0.5, holder.kill).start()
    with run_dir_locked(tmp_path / "run", "eval"):
        os.kill(child_pid, 0)
        assert f"\neval, process {os.getpid()} on " in (tmp_path / "run" / ".lock").read_text()
    assert (tmp_path / "run" / ".lock").read_text() == ""
    assert capsys.readouterr().err == ""  # before a second is over


@pytest.mark.parametrize("content", ["", "\x00\x1b", "node7", "a\nb\nc"])
def test_a_holder_whose_file_is_damaged_is_another_process(
    make_holder: MakeHolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setattr(run_dir, "_ENDING_WAIT_S", 0.0)
    hold(make_holder(), tmp_path)
    (tmp_path / ".lock").write_text(content)
    assert refusal(tmp_path).startswith(f"{tmp_path}: in use by another process;")


@pytest.fixture
def killed() -> Iterator[int]:
    """The id of a process that has ended, and whose parent has not noticed."""
    with subprocess.Popen(["sleep", "60"]) as process:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        yield process.pid


@pytest.mark.parametrize(
    ("host", "process", "limit"),
    [
        (socket.gethostname(), "live", "_LIVE_WAIT_S"),
        (socket.gethostname(), "killed", "_ENDING_WAIT_S"),
        (socket.gethostname(), "unknown", "_ENDING_WAIT_S"),
        ("node7", "live", "_REMOTE_WAIT_S"),
    ],
)
def test_how_long_a_start_waits_depends_on_whether_the_holder_can_still_end(
    make_holder: MakeHolder,
    killed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    host: str,
    process: str,
    limit: str,
) -> None:
    for name in ("_LIVE_WAIT_S", "_ENDING_WAIT_S", "_REMOTE_WAIT_S"):
        monkeypatch.setattr(run_dir, name, 0.4 if name == limit else 0.0)
    hold(make_holder(), tmp_path)
    pid = {"live": os.getpid(), "killed": killed, "unknown": 2**22 + 1}[process]
    (tmp_path / ".lock").write_text(f"{host} {pid}\ntrain, process 3\n")
    began_s = time.monotonic()
    assert "in use by train, process 3;" in refusal(tmp_path)
    assert time.monotonic() - began_s >= 0.4
    line = f"{tmp_path}: in use by train, process 3; waiting up to 0.4 s for it to exit\n"
    assert capsys.readouterr().err == ("" if process == "live" and host != "node7" else line)


def test_a_file_system_without_locks_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with run_dir_locked(tmp_path, "train"):
        pass
    assert capsys.readouterr().err.startswith(f"{tmp_path}: file system does not support locks;")


def test_every_start_adds_a_line_that_says_what_ran_where(tmp_path: Path) -> None:
    assert read_starts(tmp_path) == []

    record_start(tmp_path, 0, 1)
    record_start(tmp_path, 40, 8)

    first, second = read_starts(tmp_path)
    assert (first.step, first.world_size, second.step, second.world_size) == (0, 1, 40, 8)
    assert second.versions["bapo-megatron"] == __version__
    assert abs((datetime.now(UTC) - datetime.fromisoformat(second.time)).total_seconds()) < 60
    assert second.host == socket.gethostname()
    with (tmp_path / "starts.jsonl").open("a") as file:
        file.write('{"step": "2"}\n')
    with pytest.raises(ValueError, match=r"starts\.jsonl:3: "):
        read_starts(tmp_path)
