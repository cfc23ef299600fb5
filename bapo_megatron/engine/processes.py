"""Child processes that never outlive their owner, and the logs they leave.

Each child runs in a session of its own, so that Ctrl-C reaches the owner only, which then ends its
children in order. Standard library only: launchers of servers import this.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess
    from typing import BinaryIO

OWNER_PID_VARIABLE = "BAPO_MEGATRON_OWNER_PID"
"""Environment variable with the process id of a child's owner."""

_KILL_GRACE_S = 10.0
_POLL_S = 0.02
_TAIL_LINES = 12
_TAIL_BYTES = 64 << 10
# Set by torchrun for the trainer's ranks; a server that sees them joins the wrong rendezvous.
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "PET_", "GROUP_", "ROLE_")
_TORCHRUN_NAMES = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
)


def child_environment() -> dict[str, str]:
    """This process's environment, without what torchrun set for its rank, naming it as owner."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _TORCHRUN_NAMES and not name.startswith(_TORCHRUN_PREFIXES)
    }
    environment[OWNER_PID_VARIABLE] = str(os.getpid())
    return environment


def end_group(process: subprocess.Popen[bytes], grace_s: float = 0.0) -> None:
    """Wait until a process group is gone; kill what still runs after ``grace_s``.

    Args:
        process: The leader of the group.
        grace_s: How long the group may take to end by itself.
    """
    if not _wait_until_gone(process, grace_s):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        _wait_until_gone(process, _KILL_GRACE_S)
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _wait_until_gone(process: subprocess.Popen[bytes], wait_s: float) -> bool:
    deadline_s = time.monotonic() + wait_s
    while True:
        process.poll()  # reaps the leader, which would else count as a member
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_S)


def describe_exit(status: int) -> str:
    """A return code for people: ``exit status 1`` or ``SIGKILL``."""
    return f"exit status {status}" if status >= 0 else signal.Signals(-status).name


def open_log(path: Path) -> BinaryIO:
    """Open a child's log for appending, behind what an earlier run in the directory left there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("ab")
    log.write(f"--- started {time.strftime('%Y-%m-%d %H:%M:%S %z')} ---\n".encode())
    log.flush()
    return log


def tail(path: Path) -> str:
    """The last lines of a log, indented; of a progress bar only its last state."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            content = log.read().decode(errors="replace")
    except FileNotFoundError:
        return "    (no log)"
    states = (line.rstrip().rpartition("\r")[2] for line in content.split("\n"))
    lines = deque((line for line in states if line), _TAIL_LINES)
    return "\n".join(f"    {line}" for line in lines) or "    (empty log)"
