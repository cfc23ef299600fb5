"""Ending by a signal as an exception, so that every context manager cleans up."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_RETRY_S = 0.01


def end_by_exception() -> None:
    """Have SIGINT raise ``KeyboardInterrupt`` and SIGTERM ``SystemExit``, once, in the main thread.

    Python drops an exception that is raised within a finalizer or a weak reference's callback and
    tells ``sys.unraisablehook``; there it is raised again a moment later, until it arrives.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end_once)
    sys.unraisablehook = _end_later


def _end_once(number: int, frame: FrameType | None) -> None:
    """End; no second signal disturbs the cleaning up.

    A second one is usual: Ctrl-C reaches torchrun and its ranks, and torchrun passes it on.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    _raise(number)


def _raise(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def _end_later(unraisable: sys.UnraisableHookArgs) -> None:
    dropped = unraisable.exc_value
    if not isinstance(dropped, KeyboardInterrupt | SystemExit):
        sys.__unraisablehook__(unraisable)
        return
    number = signal.SIGINT if isinstance(dropped, KeyboardInterrupt) else signal.SIGTERM
    signal.signal(signal.SIGALRM, lambda alarm, frame: _raise(number))
    signal.setitimer(signal.ITIMER_REAL, _RETRY_S)
