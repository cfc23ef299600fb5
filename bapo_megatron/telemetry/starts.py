"""``starts.jsonl`` of a run: one object per process that began or resumed its training."""

import json
import os
import socket
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from bapo_megatron.runtime.calls import decode_json
from bapo_megatron.runtime.files import atomic_write_bytes, read_regular
from bapo_megatron.runtime.versions import own_software

_NAME = "starts.jsonl"


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the trainer."""

    time: str
    """ISO 8601, UTC."""
    step: int
    """Finished steps that it continued from; 0: from the beginning."""
    commit: str | None
    """As in ``versions.Software``."""
    versions: dict[str, str]
    host: str
    """Name of rank 0's machine."""
    world_size: int
    """Ranks."""


def record_start(run_dir: Path, step: int, world_size: int) -> None:
    """Add this process, on rank 0, after ``step`` finished steps.

    Raises:
        OSError: The file cannot be written; it is unchanged.
    """
    software, now = own_software(), datetime.now(UTC).isoformat(timespec="seconds")
    start = Start(now, step, software.commit, software.versions, socket.gethostname(), world_size)
    path = run_dir / _NAME
    before = read_regular(path) if os.path.lexists(path) else b""
    atomic_write_bytes(path, before + json.dumps(asdict(start)).encode() + b"\n")


def read_starts(run_dir: Path) -> list[Start]:
    """Return a run's starts in order; empty where the run's version recorded none.

    Raises:
        ValueError: A line is not a start; the message names file and line.
        OSError: The file cannot be read.
    """
    path = run_dir / _NAME
    starts = []
    lines = read_regular(path).splitlines() if os.path.lexists(path) else []
    for number, line in enumerate(lines, start=1):
        try:
            starts.append(decode_json(Start, line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}; remove the line") from error
    return starts
