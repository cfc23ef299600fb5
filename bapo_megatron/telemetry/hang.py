"""What each rank does, and what is said and written when a run stands still.

No collective can be used then: the ranks tell each other through torch's store, in threads.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bapo_megatron.runtime.processes import request_stacks
from bapo_megatron.telemetry.console import Pulse, say

_MAX_INTERVAL_S = 15.0
_JOIN_S = 1.0
_ALARMS = "alarms"
"""Key of the number of alarms so far; what a rank tells is under its number."""


class Told(NamedTuple):
    """What a rank told last."""

    number: int
    """How often it told anything."""
    doing: str
    num_beats: int
    """Signs of life since it began that."""
    beat_at_s: float
    """The last one, in seconds since the epoch: the clocks of a cluster agree."""


class HangWatch:
    """Has all ranks write their stacks, and more, where one makes no progress for ``hang_s``.

    Rank 0 then says in one line which rank does what, and for how long.
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
        """Prepare; ``store`` is torch's, a client of its own that no other thread uses."""
        self._pulse, self._store, self._rank, self._hang_s = pulse, store, rank, hang_s
        self._world_size, self._write_more = world_size, write_more
        self._interval_s = min(hang_s / 4, _MAX_INTERVAL_S)
        self._is_over = threading.Event()
        self._num_alarms = int(store.compare_set(_ALARMS, "", "0"))
        self._alarmed_s = 0.0
        """``Pulse.beat_s`` at the last alarm: there is one for each stop."""

    def start(self) -> Callable[[], None]:
        """Watch from now on; return what ends it."""
        thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        thread.start()

        def end() -> None:
            self._is_over.set()
            thread.join(_JOIN_S)

        return end

    def _watch(self) -> None:
        number = 0
        try:
            while not self._is_over.wait(self._interval_s):
                number += 1
                quiet_s = time.monotonic() - self._pulse.beat_s
                told = self._own(number, quiet_s)
                self._store.set(str(self._rank), json.dumps(told))
                if self._is_alarmed(quiet_s):
                    request_stacks()
                    self._write_more()
                    if self._rank == 0:
                        self._report()
        except (RuntimeError, OSError):  # the store or the disk is gone, and with it the run
            return

    def _is_alarmed(self, quiet_s: float) -> bool:
        """Whether there is a new alarm; raise it where this rank is the first to stand still."""
        beat_s, num_alarms = self._pulse.beat_s, int(self._store.get(_ALARMS))
        is_stuck = quiet_s >= self._hang_s and beat_s != self._alarmed_s
        if is_stuck and num_alarms == self._num_alarms:
            raised = self._store.compare_set(_ALARMS, str(num_alarms), str(num_alarms + 1))
            num_alarms = int(raised)  # once, also where two ranks raise it
        if num_alarms == self._num_alarms:
            return False
        self._num_alarms = num_alarms
        if quiet_s >= self._hang_s / 2:  # else it may come to stand still for another reason
            self._alarmed_s = beat_s
        return True

    def _own(self, number: int, quiet_s: float) -> Told:
        return Told(number, self._pulse.doing, self._pulse.num_beats, time.time() - quiet_s)

    def _report(self) -> None:
        """Say who does what, when every rank that lives has told it."""
        before = self._told()
        if self._is_over.wait(2 * self._interval_s):
            return
        now = self._told()
        now[0] = self._own(-1, time.monotonic() - self._pulse.beat_s)
        described = describe_ranks(before, now, time.time(), self._hang_s)
        say(
            f"no progress for {self._hang_s:g} s (log.hang_s): {described}; stacks and the last "
            "collectives are in <run_dir>/logs (docs/runtime.md)"
        )

    def _told(self) -> list[Told | None]:
        keys = map(str, range(self._world_size))
        return [
            Told(*json.loads(self._store.get(key))) if self._store.check([key]) else None
            for key in keys
        ]


def describe_ranks(
    before: Sequence[Told | None], now: Sequence[Told | None], now_s: float, hang_s: float
) -> str:
    """Say which ranks do what, first those that have stood still for longest.

    A rank that told nothing since ``before`` is stopped as a whole, or gone.
    """
    ranks: dict[str, list[int]] = {}
    since_s: dict[str, float] = {}
    for rank, (earlier, told) in enumerate(zip(before, now, strict=True)):
        if told is None:
            state, beat_at_s = "never told anything", 0.0
        elif earlier is not None and earlier.number == told.number:
            state, beat_at_s = f"silent, last in {told.doing}", 0.0
        elif now_s - told.beat_at_s < hang_s / 2:
            state, beat_at_s = f"moving in {told.doing}", told.beat_at_s
        else:
            state = f"in {told.doing} after {told.num_beats} signs of life"
            beat_at_s = told.beat_at_s
        ranks.setdefault(state, []).append(rank)
        since_s[state] = min(beat_at_s, since_s.get(state, math.inf))
    return "; ".join(
        f"{_name(ranks[state])} {state}"
        + (f" for {now_s - since_s[state]:.0f} s" if since_s[state] else "")
        for state in sorted(ranks, key=lambda state: since_s[state])
    )


def _name(ranks: Sequence[int]) -> str:
    """Such as ``rank 3`` or ``ranks 0-2, 4``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    spans = (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(spans)}"
