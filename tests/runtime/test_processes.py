"""Child processes: what they inherit, how they end, what their logs tell."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
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
    run_async,
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


def test_a_process_that_would_end_by_it_is_not_asked_for_its_stacks_whatever_its_name() -> None:
    # Its name is cut in the middle of a character.
    rename = "open('/proc/self/comm', 'wb').write(b'caf\\xc3'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.pid not in request_stacks()
        assert process.poll() is None
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


# --- ending by signals ---

PROGRAM = textwrap.dedent(
    """
    import signal, sys, time, weakref
    from bapo_megatron.runtime.processes import end_by_exception

    class Anything:
        pass

    def wait():
        for _ in range(6000):  # a signal that comes just before a sleep begins waits for its end
            time.sleep(0.01)

    def wait_for_signal(_):
        print("in the callback", flush=True)
        wait()

    def set_slowly(*arguments, set_timer=signal.setitimer):
        signal.setitimer = set_timer
        set_timer(*arguments)
        time.sleep(0.1)

    if {is_slow}:  # as where another process gets the core
        signal.setitimer = set_slowly

    end_by_exception()
    try:
        print("ready", flush=True)
        for _ in range({num_callbacks}):
            thing = Anything()
            reference = weakref.ref(thing, wait_for_signal)
            del thing  # an exception of the callback is dropped by Python
        wait()
    finally:
        print("cleaned up", flush=True)
    """
)


def end_by(
    number: signal.Signals, status: int, program: str, *, num_lines: int = 1, times: int = 1
) -> str:
    """Signal a program after its first lines; it cleans up. Return its standard error."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(num_lines):
        process.stdout.readline()
    for _ in range(times):
        process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == status, err
    assert out.splitlines()[-1] == "cleaned up"
    return err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, -2), (signal.SIGTERM, 143)])
@pytest.mark.parametrize(
    ("num_callbacks", "is_slow"), [(0, False), (1, False), (1, True), (3, False)]
)
def test_a_signal_ends_the_process_wherever_it_arrives(
    number: signal.Signals, status: int, num_callbacks: int, is_slow: bool
) -> None:
    program = PROGRAM.format(num_callbacks=num_callbacks, is_slow=is_slow)
    err = end_by(number, status, program, num_lines=2 if num_callbacks else 1)
    assert "Exception ignored" not in err


ASYNC_PROGRAM = textwrap.dedent(
    """
    import asyncio
    from bapo_megatron.runtime.processes import end_by_exception, run_async

    async def spin():
        while True:  # so that the signal arrives in a task that nobody awaits
            await asyncio.sleep(0)

    async def main():
        tasks = [asyncio.create_task(spin()) for _ in range(50)]
        print("ready", flush=True)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.2)  # cleaning up may wait
            for task in tasks:
                task.cancel()
            print("cleaned up", flush=True)

    end_by_exception()
    run_async(main())
    """
)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, -2), (signal.SIGTERM, 143)])
def test_a_signal_cancels_asynchronous_work_wherever_it_arrives(
    number: signal.Signals, status: int
) -> None:
    err = end_by(number, status, ASYNC_PROGRAM, times=3)  # only the first one counts
    assert "never retrieved" not in err


def test_asynchronous_work_that_ends_leaves_the_handlers_as_they_were() -> None:
    async def work() -> int:
        assert signal.getsignal(signal.SIGINT) is not before
        return 3

    before = signal.getsignal(signal.SIGINT)
    assert run_async(work()) == 3
    assert signal.getsignal(signal.SIGINT) is before


def test_other_dropped_exceptions_are_still_shown() -> None:
    program = PROGRAM.format(num_callbacks=1, is_slow=False).replace("time.sleep(0.01)", "1 / 0")
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert result.stderr.count("ZeroDivisionError") == 2  # the callback's and the program's
    assert "Exception ignored" in result.stderr
