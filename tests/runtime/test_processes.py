"""Child processes: what they inherit, how they end, what their logs tell."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from bapo_megatron.runtime.processes import (
    PrivateDirectory,
    child_environment,
    describe_exit,
    end_group,
    launched_number,
    open_log,
    own_compiler_cache,
    request_stacks,
    tail,
)


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
    with open_log(log) as again:
        again.write(b"later\n")
    assert tail(log) == "    later"


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


def test_a_process_whose_standard_error_is_a_socket_writes_its_stacks_there() -> None:
    program = (
        "import time; from bapo_megatron.runtime import processes; "
        "processes.write_stacks_on_signal(); print(flush=True); time.sleep(20)"
    )
    here, there = socket.socketpair()
    command = [sys.executable, "-c", program]
    with (
        here,
        there,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=there) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        assert process.pid in request_stacks()
        here.settimeout(10)
        assert here.recv(1000).startswith(b"Current thread")
        process.kill()


def test_a_process_whose_name_is_cut_in_the_middle_of_a_character_is_in_nobody_s_way() -> None:
    rename = "open('/proc/self/comm', 'wb').write(b'caf\\xc3'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.pid not in request_stacks()
        process.kill()


def test_compiled_code_is_kept_where_nobody_else_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "restored at the end")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    cache = tmp_path / f"bapo_megatron_compiled_{os.geteuid()}"
    cache.mkdir()
    cache.chmod(0o777)  # as somebody who was here first
    with pytest.raises(ValueError, match=f"^{cache}: .*TORCHINDUCTOR_CACHE_DIR"):
        own_compiler_cache()
    cache.rmdir()
    own_compiler_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache)
    assert cache.stat().st_mode & 0o777 == 0o700


KILLED = """
import os, signal
from pathlib import Path
from bapo_megatron.runtime.processes import PrivateDirectory
directory = PrivateDirectory()
shared = Path("/dev/shm") / f"sglang_loads_test_{os.getpid()}.shm"
shared.touch()
directory.note_shared_files([shared])
print(shared, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_private_directory_goes_with_its_maker_at_the_latest_when_the_next_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = tmp_path / "others"
    others.mkdir()
    (tmp_path / "bapo_megatron-link").symlink_to(others)
    living = PrivateDirectory()
    assert living.path.stat().st_mode & 0o777 == 0o700
    killed = subprocess.run(
        [sys.executable, "-c", KILLED],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    shared = Path(killed.stdout.strip())
    assert shared.exists()
    assert len(list(tmp_path.glob("bapo_megatron-????????"))) == 2
    new = PrivateDirectory()
    assert set(tmp_path.glob("bapo_megatron-????????")) == {living.path, new.path}
    assert not shared.exists()
    assert others.is_dir()
    for directory in (living, new):
        directory.close()
        directory.close()
    assert not list(tmp_path.glob("bapo_megatron-????????"))


@pytest.mark.parametrize("text", ["x", "", "-1", "0", "1e3", "²", "9" * 5000])
def test_a_number_of_ranks_that_is_none_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(ValueError, match=r"^WORLD_SIZE: "):
        launched_number("WORLD_SIZE", 1)
