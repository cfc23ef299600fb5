"""Where tables go: a terminal, a pipe or a file.

Progress of long work on the terminal: server start, generation, evaluation, conversion.

Wall time per phase.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType


_UNCUT_WIDTH = 10_000


def uncut_console() -> Console:
    """Standard output, wide enough for every row where it is neither a terminal nor given a width.

    Rich takes 80 columns then, so that a search in a pipe finds half of the cells.
    """
    console = Console()
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(width=_UNCUT_WIDTH)


def say(line: str) -> None:
    """Print a line for people on standard error, as it is."""
    Console(stderr=True).print(line, highlight=False, soft_wrap=True, markup=False)


PLAIN_INTERVAL_S = 10.0
"""Without a terminal a line is printed at most this often."""


class ProgressLine:
    """Shows one status line that changes in place; plain lines where output is no terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._status = self._console.status("starting") if self._console.is_terminal else None
        self._last_print_s = time.monotonic()

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def update(self, text: str) -> None:
        """Show what is going on, such as ``rollout 12: 40/64 groups, 2100 tokens/s``."""
        if self._status is not None:
            self._status.update(text)
        elif time.monotonic() - self._last_print_s >= PLAIN_INTERVAL_S:
            self._console.print(text, highlight=False)
            self._last_print_s = time.monotonic()


class PhaseTimer:
    """Adds up wall time by phase name, in seconds, for the current step and for the whole run."""

    def __init__(self) -> None:
        self._step_s: defaultdict[str, float] = defaultdict(float)
        self._total_s: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, duration_s: float) -> None:
        """Add ``duration_s`` seconds to a phase."""
        self._step_s[name] += duration_s
        self._total_s[name] += duration_s

    def end_step(self) -> dict[str, float]:
        """Return this step's seconds by phase and start the next step at zero."""
        step_s = dict(self._step_s)
        self._step_s.clear()
        return step_s

    @property
    def total_s(self) -> dict[str, float]:
        """Seconds by phase since the timer was made."""
        return dict(self._total_s)
