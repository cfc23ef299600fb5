"""The outcomes of programs in a sandbox, and what goes wrong with the sandbox itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

Ending = Literal["ok", "error", "timeout", "memory", "output", "exit"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a program wrote, and how it ended."""

    ending: Ending
    """``error``: an uncaught exception, another exit status than 0, or a signal. ``timeout``,
    ``memory``, ``output``: a limit ended it. Without a cgroup too much memory is an ``error``, the
    program's MemoryError. ``exit``: a cell ended its interpreter, with any status."""
    stdout: str = ""
    """Bytes that are not UTF-8 are replaced."""
    stderr: str = ""
    """Empty for cells, whose output is in one stream."""


class SandboxError(RuntimeError):
    """A sandbox failed, which is no fault of the program; the message is one line with a remedy."""


class SandboxLostError(SandboxError):
    """A sandbox was killed while a program ran in it."""

    def __init__(self, message: str, outcome: Outcome | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome
        """The program's outcome if it killed itself, which looks the same from outside: believe it
        if it happens again. None: it cannot have done this."""


def run_twice(run: Callable[[], Outcome]) -> Outcome:
    """Run a program; once more if its sandbox is lost, and then believe its outcome.

    Raises:
        SandboxLostError: The sandbox was lost twice, and not by the program.
    """
    try:
        return run()
    except SandboxLostError:
        try:
            return run()
        except SandboxLostError as error:
            if error.outcome is None:
                raise
            return error.outcome
