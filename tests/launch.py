"""Starts the command line as a user would."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

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


def start(
    arguments: list[str], *, ranks: int = 1, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start it in a process group of its own; output is captured."""
    return subprocess.Popen(
        command(arguments, ranks=ranks),
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", **(environment or {})},
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
    """Run it to its end; a run that hangs is killed and fails the test."""
    process = start(arguments, ranks=ranks, environment=environment)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout_s} s\n{out}\n{err}") from None
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
