"""Wall time per phase."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


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
