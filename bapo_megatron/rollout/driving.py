"""Drives engines that sample only when they are told to; waits for what others do by themselves.

With an ``engine.base.Stepper`` all decisions of a run are taken between two bursts of decode steps,
when everything has *settled*: every request waits inside the engine, and, where decisions depend on
scores, none is outstanding. Such a state depends neither on the clock nor on the order in which
graders answered, so two runs with one seed decide the same (docs/rollout.md).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bapo_megatron.engine.base import Stepper
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
    """Makes a pool's engine sample, in counted decode steps."""

    def __init__(
        self,
        stepper: Stepper,
        pool: EnginePool,
        is_settled: Callable[[bool], bool],
        news: asyncio.Event,
        *,
        awaits_scores: bool,
    ) -> None:
        """Put the parts together.

        Args:
            stepper: The pool's.
            pool: Says whether its engine still has the weights.
            is_settled: Whether nothing will change before the next decode step, scores included if
                its argument is true; raises what the work failed with.
            news: Is set when something that ``is_settled`` waits for has happened.
            awaits_scores: Whether scores must be there before the next decode step; else graders
                work beside the engine.
        """
        self._stepper = stepper
        self._pool = pool
        self._is_settled = is_settled
        self._news = news
        self._awaits_scores = awaits_scores

    async def settle(self, *, scored: bool = True) -> bool:
        """Wait until nothing will change before the next decode step.

        Args:
            scored: Also wait for every score.

        Returns:
            Whether that is so; else no engine holds the weights any more.

        Raises:
            RolloutError: Sampling failed.
            RewardError: Grading failed.
        """
        while True:
            for _ in range(_MAX_TURNS):
                await asyncio.sleep(0)
                if self._is_settled(scored):
                    return True
            await wait_for_news(self._news)
            if self._pool.needs_weights:
                return self._is_settled(scored)

    async def drive(self, max_steps: int) -> int:
        """Settle, make up to so many decode steps, and settle again.

        Returns:
            The decode steps made; 0 where there is no request, or nobody that could sample it.

        Raises:
            RolloutError: Sampling failed.
            RewardError: Grading failed.
        """
        if not await self.settle(scored=self._awaits_scores):
            return 0
        num_steps = await self._stepper.decode(max_steps)
        await self.settle(scored=self._awaits_scores)
        return num_steps


async def wait_for_news(news: asyncio.Event) -> None:
    """Until there are news, or for a moment; they count as read."""
    with contextlib.suppress(TimeoutError):
        # Not wait_for: in Python 3.11 it loses a cancellation that comes with the news.
        async with asyncio.timeout(_REPORT_INTERVAL_S):
            await news.wait()
    news.clear()


@contextlib.contextmanager
def reporting(report: Callable[[], None]) -> Iterator[None]:
    """Have ``report`` called at once, and then twice a second until the block ends."""

    async def repeat() -> None:
        while True:
            report()
            await asyncio.sleep(_REPORT_INTERVAL_S)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
