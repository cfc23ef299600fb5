"""Child processes: what they inherit, how they end, what their logs tell."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from bapo_megatron.processes import (
    child_environment,
    describe_exit,
    end_group,
    request_stacks,
    tail,
)

if TYPE_CHECKING:
    from pathlib import Path


def test_a_child_does_not_see_what_torchrun_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    environment = child_environment()
    assert not {"RANK", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} & environment.keys()
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["BAPO_MEGATRON_OWNER_PID"] == str(os.getpid())


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "exit status 0"), (3, "exit status 3"), (-9, "SIGKILL"), (-40, "signal 40")],
)
def test_how_a_child_ended_is_said_in_words(status: int, words: str) -> None:
    assert describe_exit(status) == words


def test_the_last_lines_of_a_log_are_shown_without_progress_bars(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    lines = [f"line {number}" for number in range(20)]
    log.write_bytes(b"\n".join(line.encode() for line in lines) + b"\n10%\r50%\rdone\n\n\xff\n")
    shown = tail(log).splitlines()
    assert shown[0] == "    line 10"
    assert shown[-2:] == ["    done", "    \ufffd"]
    assert len(shown) == 12
    assert tail(tmp_path / "none.log") == "    (no log)"


def test_a_group_that_ignores_the_request_to_end_is_killed(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/child; trap '' TERM; wait"
    process = subprocess.Popen(["sh", "-c", script], start_new_session=True)
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        time.sleep(0.01)
    end_group(process, grace_s=0.1)
    assert process.returncode == -signal.SIGKILL
    child_pid = int((tmp_path / "child").read_text())
    if psutil.pid_exists(child_pid):
        assert psutil.Process(child_pid).status() == psutil.STATUS_ZOMBIE


def test_a_process_that_would_end_by_it_is_not_asked_for_its_stacks() -> None:
    # tests/rollout/test_collector_rewards.py asks those that write them.
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert process.pid not in request_stacks()
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
