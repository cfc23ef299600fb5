"""Keeps samples on their way: each is sampled until it ends, then scored.

One task per sample. It lives as long as requests may be in flight: beyond the step that started it
with ``rollout.async_steps``. What has been received is in the sample at once, so that a task may be
ended at any moment and begun again where it stopped.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

from bapo_megatron.engine.base import SamplingSettings, sample_seed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bapo_megatron.config.rollout import RolloutConfig
    from bapo_megatron.engine.base import Completion
    from bapo_megatron.rollout.buffer import PendingGroup, PendingSample
    from bapo_megatron.rollout.engine_pool import EnginePool
    from bapo_megatron.rollout.grading import Grader


class Generation:
    """The tasks of all samples in the buffer, and what they count."""

    def __init__(self, pool: EnginePool, grader: Grader, config: RolloutConfig, seed: int) -> None:
        """Put the parts together; nothing is started.

        Args:
            pool: Samples.
            grader: Decodes and scores.
            config: Length, temperature, and what happens to requests in flight at a weight sync.
            seed: The run's seed.
        """
        self._pool = pool
        self._grader = grader
        self._config = config
        self._seed = seed
        self._tasks: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._sampling: dict[asyncio.Task[None], PendingSample] = {}
        self._failure: BaseException | None = None
        self.is_running = False
        """Whether requests may be in flight."""
        self.news = asyncio.Event()
        """Set when a sample has finished or was scored, and after a failure."""
        self.generated_tokens = 0
        """Received so far."""
        self.resumed_samples = 0
        """Requests so far that continued a response."""
        self.finished_samples = 0
        """Responses that ended so far."""

    def advance(self, groups: Iterable[PendingGroup]) -> None:
        """Work on every sample that has no score yet; what is in progress goes on."""
        if not self.is_running:
            self._pool.reopen()
            self.is_running = True
        for group in groups:
            for pending in group.samples:
                key = (group.group_id, pending.sample.index)
                if not pending.is_scored and key not in self._tasks:
                    self._start(key, pending)

    async def stop(self) -> None:
        """Abort every request; each sample has what there was. Scoring goes on."""
        if not self.is_running:
            return
        self.is_running = False
        await self._pool.drain()
        while self._sampling:
            await asyncio.wait(self._sampling)

    async def pause(self) -> None:
        """Make way for new weights, as ``weight_sync.in_flight`` says."""
        if self._config.weight_sync.in_flight == "abort":
            await self.stop()
        elif self.is_running:
            await self._pool.pause(self._config.weight_sync.in_flight)

    async def resume(self, groups: Iterable[PendingGroup]) -> None:
        """Go on after ``pause``."""
        if self.is_running:
            await self._pool.resume()
        self.advance(groups)

    def cancel(self, pending: PendingSample) -> None:
        """End the work on a sample that is given up."""
        task = self._tasks.pop((pending.sample.group_id, pending.sample.index), None)
        if task is not None:
            task.cancel()

    def raise_failure(self) -> None:
        """Do nothing while every task does its work.

        Raises:
            RolloutError: No server could go on.
            RewardError: Grading failed.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def is_settled(self, scored: bool) -> bool:
        """Whether every task that samples waits inside the engine for the next tokens.

        None is on its way there, or ends, whether its response did or was given up.

        Args:
            scored: Whether no task may be grading either.

        Raises:
            RolloutError: No server could go on.
            RewardError: Grading failed.
        """
        self.raise_failure()
        wanted = set(self._tasks.values())
        return (
            (self._sampling.keys() == wanted if scored else self._sampling.keys() <= wanted)
            and len(self._sampling) == self._pool.num_in_flight
            and not any(pending.is_finished for pending in self._sampling.values())
        )

    async def close(self) -> None:
        """End every task."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, key: tuple[int, int], pending: PendingSample) -> None:
        task = asyncio.create_task(self._advance(pending))
        self._tasks[key] = task
        if not pending.is_finished:
            self._sampling[task] = pending
        task.add_done_callback(functools.partial(self._end, key))

    def _end(self, key: tuple[int, int], task: asyncio.Task[None]) -> None:
        self._sampling.pop(task, None)
        if self._tasks.get(key) is task:
            del self._tasks[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
        self.news.set()

    async def _advance(self, pending: PendingSample) -> None:
        """Sample until the response ends or the pool is drained; score what has ended."""
        if not pending.is_finished:
            await self._sample(pending)
        if pending.is_finished:
            task = asyncio.current_task()
            assert task is not None
            self._sampling.pop(task, None)  # ``stop`` does not wait for its score
            self.news.set()
            await self._grader.score(pending)

    async def _sample(self, pending: PendingSample) -> None:
        longest, sample = self._config.max_response_tokens, pending.sample
        was_started = pending.num_tokens > 0

        def take(part: Completion) -> None:
            pending.append(part, longest)
            self.generated_tokens += len(part.token_ids)

        completion = await self._pool.generate(
            pending.input_ids(),
            SamplingSettings(
                temperature=self._config.temperature,
                max_new_tokens=longest - pending.num_tokens,
                seed=sample_seed(self._seed, sample.group_id, sample.index),
            ),
            label=f"sample {sample.index} of group {sample.group_id}, {sample.prompt.prompt_id}",
            affinity=sample.group_id,
            sampled_tokens=pending.num_tokens,
            on_part=take,
        )
        self.resumed_samples += was_started and completion is not None
        self.finished_samples += pending.is_finished
