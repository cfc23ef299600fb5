"""Unrequested exits: ``sys.exit`` and ``os._exit`` in user or library code."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from bapo_megatron.runtime.names import raised_at
from bapo_megatron.runtime.processes import RequestedExit


class EarlyExitError(ValueError):
    """User or library code exited early; the message is one line with the place."""


@contextmanager
def exits_noticed(report: Callable[[str], None]) -> Iterator[None]:
    """Keep code in the block from exiting as if the command had succeeded.

    A ``SystemExit`` of user or library code becomes an ``EarlyExitError``. ``os._exit`` still ends
    the process at once, but first calls ``report``, and status 0 becomes 1. Forked processes may
    use both. Exits in C, and ``exec``, are not noticed.
    """
    pid, exit_at_once = os.getpid(), os._exit

    def reported_exit(status: int) -> NoReturn:
        if os.getpid() == pid:
            caller = sys._getframe(1)
            place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
            try:
                report(_describe(f"os._exit({status})", place))
            finally:
                exit_at_once(status & 0xFF or 1)
        exit_at_once(status)

    os._exit = reported_exit
    try:
        yield
    except SystemExit as error:
        if isinstance(error, RequestedExit) or os.getpid() != pid:
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = raised_at(error) or f"{last.filename}:{last.lineno}"
        raise EarlyExitError(_describe(f"SystemExit({error.code!r})", place)) from error
    finally:
        os._exit = exit_at_once


def _describe(call: str, place: str) -> str:
    return f"{call} at {place} ended this process before it was done; raise an error there instead"
