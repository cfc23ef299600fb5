"""Ending with the parent process, also when it is killed with -9 (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send ``number`` to this process when the thread that started it ends.

    A parent that ends during the call counts. One that was gone before it sends nothing; compare
    ``os.getppid()`` with its known id where that may happen. It is not enough that the parent is
    process 1: in a container that may be the parent itself.
    """
    parent_pid = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), number)
