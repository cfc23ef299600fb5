"""Gets episodes on: drives an engine that has a stepper, waits for one that samples by itself.

With an ``engine.base.Stepper`` all decisions of a run are taken between two bursts of decode steps,
when everything has *settled*: every request waits inside the engine, and, where decisions depend on
scores, none is outstanding. Such a state depends neither on the clock nor on the order in which
graders answered, so two runs with one seed decide the same (docs/rollout.md).
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from bapo_megatron.rollout.episodes import Episodes
from bapo_megatron.rollout.pool import EnginePool

BURST = 16
"""Decode steps between two decisions. Responses that end within a burst are graded, and others take
their places, after it: more steps leave places empty, fewer let the engine wait for graders more
often. What a run samples depends on it, so it is no setting."""
_MAX_TURNS = 8
"""Turns of the event loop; a new task is inside the engine after the first, and so is one whose
environment has answered."""
_REPORT_INTERVAL_S = 0.5


class Driver:
    """Gets the episodes of a pool on, in counted decode steps where its engine has a stepper.

    Its coroutines raise what the work of an episode has failed with.
    """

    def __init__(self, pool: EnginePool, episodes: Episodes, *, awaits_scores: bool) -> None:
        """Keep the parts; with ``awaits_scores``, every burst waits until all scores are there."""
        self._pool = pool
        self._stepper = pool.stepper
        self._episodes = episodes
        self._awaits_scores = awaits_scores

    @property
    def is_driving(self) -> bool:
        """Whether the engine samples only when it is driven."""
        return self._stepper is not None

    async def advance(self) -> None:
        """Go on until there may be something to decide on, or for a moment."""
        if not await self.drive(BURST):
            await self._wait_for_news()
            self._episodes.raise_failure()

    async def drive(self, max_steps: int) -> int:
        """Settle, make up to so many decode steps, and settle again.

        Returns:
            The decode steps made; 0 where there is no request, or nobody that could sample it, or
            the engine samples by itself.
        """
        if self._stepper is None or not await self.settle(scored=self._awaits_scores):
            return 0
        num_steps = await self._stepper.decode(max_steps)
        await self.settle(scored=self._awaits_scores)
        return num_steps

    async def settle(self, *, scored: bool = True) -> bool:
        """Wait until nothing will change before the next decode step.

        Does nothing where the engine samples by itself.

        Args:
            scored: Also wait for every score.

        Returns:
            Whether that is so; else no engine holds the weights any more.
        """
        while self._stepper is not None:
            for _ in range(_MAX_TURNS):
                await asyncio.sleep(0)
                if self._episodes.is_settled(scored):
                    return True
            await self._wait_for_news()
            if self._pool.needs_weights:
                return self._episodes.is_settled(scored)
        return True

    async def _wait_for_news(self) -> None:
        """Wait for news, but only for a moment; they count as read."""
        with contextlib.suppress(TimeoutError):
            # Not wait_for: in Python 3.11 it loses a cancellation that comes with the news.
            async with asyncio.timeout(_REPORT_INTERVAL_S):
                await self._episodes.news.wait()
        self._episodes.news.clear()


@contextlib.contextmanager
def reporting(report: Callable[[], None]) -> Iterator[None]:
    """Call ``report`` at once, and then twice a second until the block ends."""

    async def repeat() -> None:
        while True:
            report()
            await asyncio.sleep(_REPORT_INTERVAL_S)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
