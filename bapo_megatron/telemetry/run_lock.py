"""``.lock`` of a run directory: one process works in it at a time, and others can say which.

The lock is a POSIX record lock. The kernel releases it when the process ends, however that happens;
no child has it, not even a fork that lives on; and NFS passes it on to other machines.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

from bapo_megatron.runtime.calls import decode_json
from bapo_megatron.runtime.files import lock, naming
from bapo_megatron.telemetry.console import say

_NAME = ".lock"
_LIVE_S = 1.0
"""Time limit of the wait for a holder that lives: it may be about to end."""
_ENDING_S = 30.0
"""For one that ends: after SIGKILL the kernel frees hundreds of GB before it releases the lock."""
_ELSEWHERE_S = 120.0
"""For one on another machine: if that has died, an NFS server keeps its lock for 90 s or so."""
_POLL_S = 0.1
_MAX_BYTES = 4096
_PF_EXITING = 0x4


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
        file.truncate(0)  # no other is to name this process from now on


def _take(file: IO[bytes], run_dir: Path) -> None:
    """Lock the file; its holder gets time to end, or to write who it is."""
    began_s, has_said = time.monotonic(), False
    while True:
        try:
            if not lock(file, inherited=False):
                say(f"{run_dir}: its file system has no locks; do not start two runs in it")
            return
        except BlockingIOError as error:
            holder, waited_s = _read_holder(file), time.monotonic() - began_s
            limit_s, described = _patience_s(holder), _describe_holder(holder)
            if waited_s >= limit_s:
                raise ValueError(
                    f"{run_dir}: in use by {described}; wait until it ends, or choose another "
                    "run_dir"
                ) from error
        if waited_s >= _LIVE_S and not has_said:
            has_said = True
            say(f"{run_dir}: in use by {described}; waiting for its end, at most {limit_s:g} s")
        time.sleep(_POLL_S)


def _read_holder(file: IO[bytes]) -> _Holder | None:
    """Return what is in the file; None where it was damaged, by hand or by a full disk."""
    file.seek(0)
    try:
        return decode_json(_Holder, file.read(_MAX_BYTES))
    except ValueError:
        return None


def _patience_s(holder: _Holder | None) -> float:
    if holder is None:  # it may have the lock, and not yet have written
        return _ENDING_S
    if holder.host != socket.gethostname():
        return _ELSEWHERE_S
    return _LIVE_S if _is_live(holder.pid) else _ENDING_S


def _is_live(pid: int) -> bool:
    """Return whether a process of this machine exists and is not about to end."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    fields = stat.rpartition(b")")[2].split()  # from the third one on, see proc(5)
    state, flags, pending = fields[0], int(fields[6]), int(fields[28])
    is_killed = pending >> (signal.SIGKILL - 1) & 1
    return state not in (b"Z", b"X") and not flags & _PF_EXITING and not is_killed


def _describe_holder(holder: _Holder | None) -> str:
    if holder is None:
        return "another process"
    start = f"{holder.start:%Y-%m-%d %H:%M:%S %z}"
    return f"{holder.command}, process {holder.pid} on {holder.host} since {start}"
