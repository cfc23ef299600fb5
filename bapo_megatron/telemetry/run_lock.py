"""``.lock`` of a run directory: one process works in it at a time, and others can say which.

The lock is a POSIX record lock. The kernel releases it when the process ends, however that happens;
no child has it, not even a fork that lives on; and NFS passes it on to other machines.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

from bapo_megatron.calls import decode_json
from bapo_megatron.files import lock, naming
from bapo_megatron.telemetry.console import say

_NAME = ".lock"
_TRIES = 10
_RETRY_S = 0.1
_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class _Holder:
    """What the process that holds the lock writes into the file."""

    command: str
    """``train``, ``eval`` or ``generate``."""
    pid: int
    host: str
    start: datetime
    """With zone."""


@contextmanager
def run_dir_locked(run_dir: Path, command: str) -> Iterator[None]:
    """Make the run directory if it is missing, and hold its lock within the block.

    Nothing else in this process may open ``.lock``: closing it would release the lock.

    Raises:
        ValueError: Another process holds it; the message names that.
        OSError: The directory or the file cannot be written.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / _NAME
    with path.open("a+b", buffering=0) as file:
        with naming(path):
            _take(file, run_dir)
            start = datetime.now().astimezone().replace(microsecond=0)
            holder = _Holder(command, os.getpid(), socket.gethostname(), start)
            file.truncate(0)
            file.write(json.dumps(asdict(holder), default=datetime.isoformat).encode() + b"\n")
        yield


def _take(file: IO[bytes], run_dir: Path) -> None:
    """Lock the file; its holder gets a moment to end, or to write who it is."""
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            if not lock(file, inherited=False):
                say(f"{run_dir}: its file system has no locks; do not start two runs in it")
            return
        time.sleep(_RETRY_S)
    raise ValueError(
        f"{run_dir}: in use by {_describe_holder(file)}; wait until it ends, or choose another "
        "run_dir"
    )


def _describe_holder(file: IO[bytes]) -> str:
    file.seek(0)
    try:
        holder = decode_json(_Holder, file.read(_MAX_BYTES))
    except ValueError:  # by hand, or by a full disk
        return "another process"
    start = f"{holder.start:%Y-%m-%d %H:%M:%S %z}"
    return f"{holder.command}, process {holder.pid} on {holder.host} since {start}"
