"""Hang detection: reports of all ranks, and diagnostics if a run makes no progress.

Ranks report through torch's store, in threads, because collectives may hang as well.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from bapo_megatron.runtime.processes import request_stacks
from bapo_megatron.telemetry.console import Pulse, say

_MAX_INTERVAL_S = 15.0
_JOIN_S = 1.0


class RankReport(NamedTuple):
    """The latest report of a rank; stored under the rank's number."""

    number: int
    """Number of reports sent so far."""
    phase: str
    num_beats: int
    """Heartbeats since the phase began."""
    beat_at_s: float
    """Time of the last one, in seconds since the epoch; clocks of a cluster must agree."""


class HangWatch:
    """Writes this rank's stacks and traces if it makes no progress for ``hang_s``.

    Ranks wait for each other, so soon all of them hang; rank 0 then prints what every rank does.
    """

    def __init__(
        self,
        pulse: Pulse,
        store: Any,
        rank: int,
        world_size: int,
        hang_s: float,
        write_more: Callable[[], None],
    ) -> None:
        """Prepare; ``store`` is a torch store that no other thread uses."""
        self._pulse, self._store, self._rank, self._hang_s = pulse, store, rank, hang_s
        self._world_size, self._write_more = world_size, write_more
        self._interval_s = min(hang_s / 4, _MAX_INTERVAL_S)
        self._has_ended = threading.Event()

    def start(self) -> Callable[[], None]:
        """Start watching; return the function that stops it."""
        thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        thread.start()

        def end() -> None:
            self._has_ended.set()
            thread.join(_JOIN_S)

        return end

    def _watch(self) -> None:
        number, alarmed_beat_s = 0, 0.0
        try:
            while not self._has_ended.wait(self._interval_s):
                number += 1
                self._store.set(str(self._rank), json.dumps(self._report(number)))
                beat_s = self._pulse.beat_s
                is_stuck = time.monotonic() - beat_s >= self._hang_s
                if is_stuck and beat_s != alarmed_beat_s:  # once per hang
                    alarmed_beat_s = beat_s
                    request_stacks()
                    self._write_more()
                    if self._rank == 0:
                        self._describe()
        except (RuntimeError, OSError):  # the store or the disk is gone, and so is the run
            return

    def _report(self, number: int) -> RankReport:
        beat_at_s = time.time() - (time.monotonic() - self._pulse.beat_s)
        return RankReport(number, self._pulse.phase, self._pulse.num_beats, beat_at_s)

    def _describe(self) -> None:
        """Print what every rank does, once all live ranks have reported again."""
        before = self._reports()
        if self._has_ended.wait(2 * self._interval_s):
            return
        now = self._reports()
        now[0] = self._report(-1)
        say(
            f"no progress for {self._hang_s:g} s (log.hang_s): "
            f"{describe_ranks(before, now, time.time(), self._hang_s)}; stacks and collective "
            "traces are in <run_dir>/logs (docs/runtime.md)"
        )

    def _reports(self) -> list[RankReport | None]:
        keys = map(str, range(self._world_size))
        return [
            RankReport(*json.loads(self._store.get(key))) if self._store.check([key]) else None
            for key in keys
        ]


def describe_ranks(
    before: Sequence[RankReport | None],
    now: Sequence[RankReport | None],
    now_s: float,
    hang_s: float,
) -> str:
    """Describe what the ranks do, those stuck longest first.

    A rank without a new report since ``before`` is stopped as a whole, or gone.
    """
    ranks: dict[str, list[int]] = {}
    since_s: dict[str, float] = {}
    for rank, (earlier, report) in enumerate(zip(before, now, strict=True)):
        beat_at_s = 0.0
        if report is None:
            state = "never reported"
        elif earlier is not None and earlier.number == report.number:
            state = f"not responding, last in {report.phase}"
        elif now_s - report.beat_at_s < hang_s / 2:
            state, beat_at_s = f"progressing in {report.phase}", now_s
        else:
            beat_at_s = report.beat_at_s
            state = f"stuck in {report.phase} for {{}} s after {report.num_beats} heartbeats"
        ranks.setdefault(state, []).append(rank)
        since_s[state] = min(beat_at_s, since_s.get(state, now_s))
    return "; ".join(
        f"{_name(ranks[state])} {state.replace('{}', f'{now_s - since_s[state]:.0f}')}"
        for state in sorted(ranks, key=lambda state: since_s[state])
    )


def _name(ranks: Sequence[int]) -> str:
    """Return such as ``rank 3`` or ``ranks 0-2, 4``."""
    gaps = [pair for pair in pairwise(ranks) if pair[1] != pair[0] + 1]
    firsts, lasts = [ranks[0], *(after for _, after in gaps)], [*(b for b, _ in gaps), ranks[-1]]
    spans = (f"{a}-{b}" if a < b else str(a) for a, b in zip(firsts, lasts, strict=True))
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(spans)}"
