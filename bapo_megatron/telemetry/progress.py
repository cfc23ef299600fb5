"""Progress of long work on the terminal: server start, generation, evaluation, conversion."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from rich.console import Console

if TYPE_CHECKING:
    from types import TracebackType

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
