"""How late an event loop runs what is due: the sign of a process that has too much to do."""

import asyncio

_INTERVAL_S = 0.1


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
