"""Ending by a signal as an exception, so that every context manager cleans up."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_RETRY_S = 0.01
_T = TypeVar("_T")


def end_by_exception() -> None:
    """Have SIGINT raise ``KeyboardInterrupt`` and SIGTERM ``SystemExit``, once, in the main thread.

    Python drops an exception that is raised within a finalizer or a weak reference's callback and
    tells ``sys.unraisablehook``; there it is raised again a moment later, until it arrives.
    """
    for number in _SIGNALS:
        signal.signal(number, _end_once)
    sys.unraisablehook = _end_later


def run_async(work: Coroutine[Any, Any, _T]) -> _T:
    """``asyncio.run`` that SIGINT and SIGTERM end by cancellation, and by their exception after it.

    Without this the exception would be raised in whichever task happens to run.
    """
    received: list[int] = []

    async def run() -> _T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "asyncio.run makes one"

        def cancel(number: int, frame: FrameType | None) -> None:
            _ignore_signals()
            received.append(number)
            loop.call_soon_threadsafe(task.cancel)

        before = {number: signal.signal(number, cancel) for number in _SIGNALS}
        try:
            return await work
        finally:
            if not received:
                for number, handler in before.items():
                    signal.signal(number, handler)

    try:
        return asyncio.run(run())
    finally:
        if received:
            _raise(received[0])


def _end_once(number: int, frame: FrameType | None) -> None:
    _ignore_signals()
    _raise(number)


def _ignore_signals() -> None:
    """No second signal disturbs the cleaning up.

    One is usual: Ctrl-C reaches torchrun and its ranks, and torchrun passes it on.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _raise(number: int) -> NoReturn:
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
