"""How a measured process takes turns with others: it trains a batch only when it is told to.

The other end is ``bench_trl.py``. Only the standard library is imported, so that a process of any
environment can use it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class Turns:
    """The turns of one process: a line on standard input is a turn, its end is the end."""

    def __init__(self, cores: list[int]) -> None:
        """Take over standard output, so that nothing a library prints mixes with replies.

        All threads of the process run on ``cores`` from the first turn on.
        """
        self._cores = cores
        self._replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._began_s: float | None = None

    def wait(self, **measured: Any) -> None:
        """Report the turn that ends here, and what was measured in it; wait for the next one."""
        seconds = None if self._began_s is None else time.perf_counter() - self._began_s
        reply = {"seconds": seconds, "peak_bytes": _peak_bytes(), **measured}
        self._replies.write(json.dumps(reply) + "\n")
        self._replies.flush()
        if not sys.stdin.readline():
            raise SystemExit
        if self._began_s is None:
            for thread in Path("/proc/self/task").iterdir():
                os.sched_setaffinity(int(thread.name), self._cores)
        self._began_s = time.perf_counter()


def _peak_bytes() -> int:
    """Most resident memory that this process has had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("Linux reports VmHWM")
