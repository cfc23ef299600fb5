"""The interface of sandboxes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

Ending = Literal["ok", "error", "timeout", "memory", "output"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a program wrote, and how it ended."""

    ending: Ending
    """``error``: an uncaught exception, another exit status than 0, or a signal. ``timeout``,
    ``memory``, ``output``: a limit ended it. Without a cgroup too much memory is an ``error``, the
    program's MemoryError."""
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


class Session(Protocol):
    """An interpreter that keeps its variables between cells."""

    def run(self, cell: str, timeout_s: float | None = None) -> Outcome:
        """Run a cell; the value of a last expression is printed, as by the interactive interpreter.

        ``timeout_s`` replaces the configured limit. After a limit the session ``has_ended``.

        Raises:
            SandboxLostError: The sandbox was killed; the session has ended.
        """

    @property
    def has_ended(self) -> bool:
        """Whether it can run no further cell."""

    def close(self) -> None:
        """End all of its processes. Safe to call twice."""


class Sandbox(Protocol):
    """Runs programs, one at a time; any number of sessions may be open beside it.

    It belongs to the thread that creates it. When its process ends, for whatever reason, so do the
    programs.
    """

    def run(self, program: str, stdin: str = "") -> Outcome:
        """Run a program in a fresh sandbox.

        Raises:
            SandboxError: The sandbox failed twice.
        """

    def session(self) -> Session:
        """Start an interpreter for cells; the caller closes it.

        Raises:
            SandboxError: It does not start.
        """

    def describe(self) -> str:
        """Return what limits a program here, for people."""

    def close(self) -> None:
        """End all programs and release everything. Safe to call twice."""
