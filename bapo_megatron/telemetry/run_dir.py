"""A run directory: the lock that limits it to one process, and ``starts.jsonl``.

The lock is a POSIX record lock on ``.lock``. The kernel releases it when the process ends, however
it does; children do not inherit it, not even forks; and it works across machines on NFS. The file
names the holder: host and process, and a line for people.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from bapo_megatron.runtime.calls import decode_lines
from bapo_megatron.runtime.files import atomic_write_bytes, lock, naming, read_regular
from bapo_megatron.runtime.versions import own_software
from bapo_megatron.telemetry.console import say

_LIVE_WAIT_S = 1.0
"""Time limit of the wait for a live holder, which may be about to exit."""
_ENDING_WAIT_S = 30.0
"""For a holder that is exiting: after SIGKILL the kernel may first free hundreds of GB."""
_REMOTE_WAIT_S = 120.0
"""For a holder on another machine: if that died, NFS servers keep the lock for about 90 s."""
_POLL_S = 0.1
_MAX_BYTES = 4096
_STARTS_NAME = "starts.jsonl"


@contextmanager
def run_dir_locked(run_dir: Path, command: str) -> Iterator[None]:
    """Create the run directory if it is missing, and hold its lock within the block.

    Nothing else in this process may open ``.lock``, because closing it would release the lock.

    Raises:
        ValueError: Another process holds it; the message names the process.
        OSError: The directory or the file cannot be written.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / ".lock"
    with path.open("a+b", buffering=0) as file:
        with naming(path):
            _acquire(file, run_dir)
            host, start = socket.gethostname(), datetime.now().astimezone()
            line = f"{command}, process {os.getpid()} on {host} since {start:%Y-%m-%d %H:%M:%S %z}"
            file.truncate(0)
            file.write(f"{host} {os.getpid()}\n{line}\n".encode())
        yield
        file.truncate(0)  # so that the next process does not report this one


def _acquire(file: IO[bytes], run_dir: Path) -> None:
    """Lock the file; give its holder time to exit, or to write its name."""
    began_s, has_said = time.monotonic(), False
    while True:
        try:
            if not lock(file, inherited=False):
                say(
                    f"{run_dir}: file system does not support locks; do not start a second run in "
                    "this directory"
                )
            return
        except BlockingIOError as error:
            waited_s, (limit_s, holder) = time.monotonic() - began_s, _read_holder(file)
            if waited_s >= limit_s:
                raise ValueError(
                    f"{run_dir}: in use by {holder}; wait until it ends, or choose another run_dir"
                ) from error
        if waited_s >= _LIVE_WAIT_S and not has_said:
            has_said = True
            say(f"{run_dir}: in use by {holder}; waiting up to {limit_s:g} s for it to exit")
        time.sleep(_POLL_S)


def _read_holder(file: IO[bytes]) -> tuple[float, str]:
    """Return how long to wait for the holder, and its name for people."""
    file.seek(0)
    lines = file.read(_MAX_BYTES).decode(errors="replace").splitlines()
    if len(lines) != 2:  # damaged, or not yet written
        return _ENDING_WAIT_S, "another process"
    host, _, pid = lines[0].partition(" ")
    if host != socket.gethostname():
        return _REMOTE_WAIT_S, lines[1]
    try:  # empty once the kernel frees the memory of an exiting process
        is_live = bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except (OSError, ValueError):
        is_live = False
    return _LIVE_WAIT_S if is_live else _ENDING_WAIT_S, lines[1]


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the trainer: a line of ``starts.jsonl``."""

    time: str
    """ISO 8601, UTC."""
    step: int
    """Finished steps at the start; 0 for a new run."""
    commit: str | None
    """As in ``versions.Software``."""
    versions: dict[str, str]
    host: str
    """Host name of rank 0."""
    world_size: int
    """Number of ranks."""


def record_start(run_dir: Path, step: int, world_size: int) -> None:
    """Append a start of this process, on rank 0, after ``step`` finished steps.

    Raises:
        OSError: The file cannot be written; it is unchanged.
    """
    software, now = own_software(), datetime.now(UTC).isoformat(timespec="seconds")
    start = Start(now, step, software.commit, software.versions, socket.gethostname(), world_size)
    path = run_dir / _STARTS_NAME
    before = read_regular(path) if os.path.lexists(path) else b""
    atomic_write_bytes(path, before + json.dumps(asdict(start)).encode() + b"\n")


def read_starts(run_dir: Path) -> list[Start]:
    """Return a run's starts in order; empty for runs of versions that recorded none.

    Raises:
        ValueError: A line is not a start; the message names file and line.
        OSError: The file cannot be read.
    """
    path = run_dir / _STARTS_NAME
    return decode_lines(Start, read_regular(path), path) if os.path.lexists(path) else []
