"""Starts the command line as a user would."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.distributed_launch import start_fork

REPOSITORY = Path(__file__).resolve().parent.parent


def command(arguments: list[str], *, ranks: int = 1) -> list[str]:
    """The command line of ``bapo_megatron``; under torchrun for more than one rank."""
    if ranks == 1:
        return [sys.executable, "-m", "bapo_megatron", *arguments]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--master-port",
        str(free_port()),
        "-m",
        "bapo_megatron",
        *arguments,
    ]


def _environment(additions: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", **additions}


def start(
    arguments: list[str], *, ranks: int = 1, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start it in a process group of its own; output is captured."""
    return subprocess.Popen(
        command(arguments, ranks=ranks),
        cwd=REPOSITORY,
        env=_environment(environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(
    arguments: list[str],
    *,
    ranks: int = 1,
    timeout_s: float = 240,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run it to its end; a run that hangs is killed and fails the test.

    One rank is a fork that has imported everything: a start from nothing takes seconds.
    """
    if ranks == 1:
        return _run_fork(arguments, timeout_s, environment or {})
    process = start(arguments, ranks=ranks, environment=environment)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout_s} s\n{out}\n{err}") from None
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def _run_fork(
    arguments: list[str], timeout_s: float, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as scratch:
        process = start_fork(_main, arguments, _environment(environment), scratch)
        process.join(timeout_s)
        has_ended = process.exitcode is not None
        if not has_ended:
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
        out, err = (Path(scratch, name).read_text() for name in ("out", "err"))
    assert has_ended, f"still running after {timeout_s} s\n{out}\n{err}"
    return subprocess.CompletedProcess(arguments, process.exitcode or 0, out, err)


def _main(arguments: list[str], environment: dict[str, str], scratch: str) -> None:
    """Be the process that ``start`` starts."""
    os.setsid()
    for name, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(Path(scratch, name), os.O_CREAT | os.O_WRONLY), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(REPOSITORY)
    sys.argv = [str(REPOSITORY / "bapo_megatron" / "__main__.py"), *arguments]
    try:
        runpy.run_module("bapo_megatron", run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
