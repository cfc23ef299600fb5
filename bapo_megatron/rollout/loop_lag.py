"""How late an event loop runs what is due: the sign of a process that has too much to do."""

import asyncio
import gc

_INTERVAL_S = 0.1
_GARBAGE_THRESHOLDS = (50_000, 50, 50)


def collect_garbage_rarely() -> None:
    """Keep the garbage collector from stopping the event loop; ``gc.collect`` is then due at times.

    The answers of SGLang are nested lists, so that Python's defaults search all objects for garbage
    again and again: with 8,192 requests in flight for up to 1.5 s at a time, which made the loop
    9 s late (docs/benchmarks/connections_cpu_202611.md).
    """
    gc.freeze()
    gc.set_threshold(*_GARBAGE_THRESHOLDS)


class LoopLag:
    """Looks at the clock of the running event loop in equal intervals."""

    def __init__(self) -> None:
        self._max_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Measure from now on; do nothing if that was begun already."""
        if self._timer is None:
            self._schedule()

    def stop(self) -> None:
        """Measure no more."""
        if self._timer is not None:
            self._timer.cancel()

    def take_max(self) -> float:
        """Return the largest lag since the last call, in seconds."""
        max_s, self._max_s = self._max_s, 0.0
        return max_s

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_INTERVAL_S, self._measure)

    def _measure(self) -> None:
        assert self._timer is not None
        self._max_s = max(self._max_s, asyncio.get_running_loop().time() - self._timer.when())
        self._schedule()
