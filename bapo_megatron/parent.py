"""Ending with the parent process, also when it is killed with -9 (Linux)."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send ``number`` to this process when the thread that started it ends.

    A parent that is already gone sends nothing; compare ``os.getppid()`` afterwards where that
    may happen.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
