"""Collectors that are forks of a process which has imported torch, so that their start is cheap.

Starting a collector from nothing takes seconds. A fork does the same work, and ends with its client
as well.
"""

import contextlib
import logging
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO
from unittest import mock

from bapo_megatron.rollout import client
from bapo_megatron.runtime.processes import OWNER_PID_VARIABLE
from tests.distributed_launch import forget_signal_handlers, start_fork


def prepare_forks() -> None:
    """Start what forks come from, which is no process of the test that needs one first."""
    start_fork(os.getpid).join()


@contextlib.contextmanager
def forked_collectors() -> Iterator[None]:
    """Let clients that start inside the block start forks."""
    stand_in = SimpleNamespace(
        Popen=_ForkedCollector, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT
    )
    with mock.patch.object(client, "subprocess", stand_in):
        yield


class _ForkedCollector:
    """What a client uses of the ``subprocess.Popen`` of its collector."""

    stdin = None

    def __init__(
        self, command: Sequence[str], *, env: dict[str, str], stdout: BinaryIO, **_others: Any
    ) -> None:
        with socket.socket(fileno=os.dup(int(command[-1]))) as connection:
            self._process = start_fork(_collect, connection, env, Path(stdout.name))
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired("collector", timeout)
        return status


def _collect(connection: socket.socket, environment: dict[str, str], log_path: Path) -> None:
    """Be the process that a client starts."""
    os.setsid()
    forget_signal_handlers()
    for entry in Path("/proc/self/fd").iterdir():  # of a fork of the client: its own end, too
        with contextlib.suppress(OSError):
            is_socket = str(entry.readlink()).startswith("socket:")
            if is_socket and int(entry.name) not in (0, 1, 2, connection.fileno()):
                os.close(int(entry.name))
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    os.environ.clear()
    # The parent of a fork is the process that it comes from, and ends with the owner.
    os.environ.update(environment, **{OWNER_PID_VARIABLE: str(os.getppid())})
    logging.getLogger().handlers.clear()

    from bapo_megatron.rollout import collector

    collector.main(connection.detach())
