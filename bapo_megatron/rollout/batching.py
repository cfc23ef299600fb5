"""Runs the scheduler of batches in the event loop: engines and graders do what it asks for.

With ``async_steps`` 0, nothing is in flight between two calls of ``collect``; otherwise generation
runs at most that many steps ahead. With ``fixed_lag``, or an engine with a stepper (``episodes``),
generation ahead ends by itself, and every later call waits for that.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from bapo_megatron.rollout.buffer import Episode, PendingGroup
from bapo_megatron.rollout.episodes import BURST, Episodes, Interaction
from bapo_megatron.rollout.grading import Grader
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.rollout.saved import SavedRollout
from bapo_megatron.rollout.scheduling import BatchGoal, Scheduler
from bapo_megatron.telemetry.console import describe_rate, reporting
from bapo_megatron.types import RolloutBatch, RolloutStats, SampleText

_LAG_INTERVAL_S = 0.1


class LoopLag:
    """How late the event loop runs timers: the sign that it is overloaded."""

    def __init__(self) -> None:
        self._max_s = 0.0

    async def measure(self) -> None:
        """Measure until cancelled."""
        while True:
            due_s = time.monotonic() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            self._max_s = max(self._max_s, time.monotonic() - due_s)

    def take_max(self) -> float:
        """Return the largest lag since the last call, in seconds."""
        max_s, self._max_s = self._max_s, 0.0
        return max_s


@dataclass(eq=False)
class BatchCollector:
    """Forms the batches in order."""

    scheduler: Scheduler
    interaction: Interaction
    grader: Grader
    report: Callable[[str], None]
    loop_lag: LoopLag = field(default_factory=LoopLag)
    is_interrupted: bool = False
    """End ``collect`` at once, as if no server held the weights; the buffer keeps everything."""
    _is_attached: bool = False
    _pool: EnginePool = field(init=False)
    _episodes: Episodes = field(init=False)
    _ahead: asyncio.Task[None] | None = None
    """Generates ahead, if anything; the next ``collect`` raises its failure."""
    _is_paused: bool = False
    _started_s: float = 0.0
    _spent_s: float = 0.0
    """Generation time of the batch before an interruption, possibly in an earlier process."""

    def __post_init__(self) -> None:
        self._config = self.scheduler.config

    def attach(self, pool: EnginePool) -> None:
        """Sample from this pool; must be called before the first batch."""
        self._pool, self._is_attached = pool, True
        self._episodes = Episodes(
            pool,
            self.interaction,
            self.grader,
            self.scheduler.request_of,
            awaits_scores=self.scheduler.selection.needs_scores,
            gives_up=lambda: self.is_interrupted and self._num_waiting > 0,
        )

    async def close(self) -> None:
        """Cancel every task."""
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)
        await self._episodes.close()

    async def wait_for_ahead(self) -> None:
        """Wait for generation ahead, if it ends by itself."""
        if self._ahead is not None:
            await asyncio.wait([self._ahead])

    async def collect(
        self, step: int, hand_over: Callable[[RolloutBatch, Sequence[SampleText]], Awaitable[None]]
    ) -> RolloutBatch | None:
        """Generate and score the batch of ``step`` (1, 2, …), and hand it over with its texts.

        Its groups count as trained only once ``hand_over`` has returned; if that fails, nothing has
        changed, and the next call forms the batch again. Returns None if no server holds the newest
        weights any more: sync them and call again.

        Raises:
            RolloutError: No server could continue.
            RewardError: Grading failed.
        """
        version = self._pool.states.version
        assert version is not None, "weights are synchronised before the first batch"
        if not self._episodes.is_running and self._ahead is None:
            # Generation starts, or continues after an interruption: restart the clock.
            self._started_s, self._spent_s = time.monotonic() - self._spent_s, 0.0
        with reporting(lambda: self.report(f"rollout {step}: {self._describe()}")):
            await self._end_ahead()
            goal = self.scheduler.begin(step, version)
            generated = await self._generate(goal)
        if generated is None:
            if not self._episodes.is_running:
                self._spent_s = time.monotonic() - self._started_s
            return None
        taken, generation_s = generated
        formed_s = time.monotonic()
        formed = self.scheduler.form(
            goal,
            taken,
            self._counters(),
            generation_s=generation_s,
            engine_load=self._pool.states.take_load(),
            loop_lag_s=self.loop_lag.take_max(),
        )
        texts = [episode.text() for group in formed.groups for episode in group.episodes]
        await hand_over(formed.batch, texts)
        self._cancel(self.scheduler.take(formed))
        self._started_s = formed_s
        if goal.num_ahead:
            self._ahead = asyncio.create_task(self._generate_ahead(goal))
        return formed.batch

    async def pause(self) -> bool:
        """Pause for new weights until ``resume``; return whether generation was running."""
        await self.wait_for_ahead()
        if self._episodes.is_running:
            self._is_paused = True
            if self._config.weight_sync.in_flight == "abort":
                await self._episodes.stop()
            else:
                await self._pool.pause(self._config.weight_sync.in_flight)
        return self._is_paused

    async def resume(self) -> None:
        """Continue after ``pause``, without responses that are too old for the new weights."""
        if self._is_paused:
            if self._pool.states.version is not None:
                self._give_up_stale(self._pool.states.version)
            self._is_paused = False
            if self._episodes.is_running:
                await self._pool.resume()
            self._episodes.advance(self.scheduler.buffer)

    def state(self) -> SavedRollout:
        """Return what ``restore`` continues from; a run may stop before there is a pool."""
        spent_s = self._spent_s
        if not self._is_attached:
            return self.scheduler.state(RolloutStats(environment_errors={}), spent_s)
        if self._episodes.is_running or self._ahead is not None:
            spent_s = time.monotonic() - self._started_s
        return self.scheduler.state(self._counters(), spent_s)

    def restore(self, saved: SavedRollout) -> None:
        """Continue from what ``state`` returned; raises as ``Scheduler.restore``."""
        teacher = self.grader.teacher
        self.scheduler.restore(saved, teacher.has_scored if teacher else lambda _: True)
        self._spent_s = saved.about.generation_s

    async def _generate(self, goal: BatchGoal) -> tuple[list[PendingGroup], float] | None:
        """Generate and score a batch's new groups; return them and the seconds, or None."""
        while True:
            self._give_up_stale(goal.version)
            self._advance(goal.num_wanted)
            if self._choose(goal):
                break
            if self.is_interrupted:
                await self._stop()
            if self._pool.states.needs_weights or self.is_interrupted:
                return None
            await self._episodes.wait_for_change()
        generation_s = time.monotonic() - self._started_s
        if not goal.num_ahead:
            await self._stop()
            # Older groups may have been scored meanwhile; they come first unless they are too old.
            self._give_up_stale(goal.version)
        taken = self._choose(goal)
        await self._episodes.settle()  # so that counters do not depend on graders
        while not all(group.is_scored for group in taken):
            if self.is_interrupted:  # waiting for a teacher can take long
                await self._stop()
                return None
            await self._episodes.wait_for_change()
        return taken, generation_s

    def _choose(self, goal: BatchGoal) -> list[PendingGroup]:
        return self.scheduler.choose(goal, self._episodes.generated_tokens)

    def _advance(self, num_groups: int) -> None:
        """Draw the prompts that ``num_groups`` groups still need; continue every sample."""
        self.scheduler.draw(num_groups)
        self._episodes.advance(self.scheduler.buffer)

    def _give_up_stale(self, version: int) -> None:
        """Drop or regenerate what is older than ``rollout.staleness`` allows."""
        nothing_in_flight = self._is_paused or not self._episodes.is_running
        self._cancel(self.scheduler.give_up_stale(version, unfinished=nothing_in_flight))

    def _cancel(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            self._episodes.cancel(episode)

    async def _stop(self) -> None:
        await self._episodes.stop()
        await self._episodes.settle()

    async def _generate_ahead(self, goal: BatchGoal) -> None:
        """Generate for later steps during training.

        With a fixed lag, the current weights complete all groups; an engine with a stepper takes a
        limited number of decode steps. Otherwise requests stay in flight.
        """
        try:
            self._advance(goal.num_ahead)
            if self._config.fixed_lag is not None:
                while not all(group.is_finished for group in self.scheduler.buffer):
                    if self._pool.states.needs_weights:
                        break  # ``Scheduler.begin`` raises, unless the same weights come again
                    await self._episodes.wait_for_change()
            elif self._pool.stepper is None:
                return
            else:
                remaining = self._config.decode_steps_ahead
                while remaining and (steps := await self._episodes.drive(min(BURST, remaining))):
                    remaining -= steps
                    self._give_up_stale(goal.version)
                    self._advance(goal.num_ahead)
            await self._stop()
        except Exception:
            # The failure is raised only by the next ``collect``, perhaps after a weight sync.
            await self._episodes.stop()
            raise

    async def _end_ahead(self) -> None:
        """Wait for generation ahead, and raise its failure."""
        await self.wait_for_ahead()
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            ahead.result()

    def _counters(self) -> RolloutStats:
        """Return what pool, graders and environments have counted so far."""
        teacher = self.grader.teacher
        return RolloutStats(
            generated_tokens=self._episodes.generated_tokens,
            resumed_samples=self._episodes.resumed_samples,
            lost_requests=self._pool.num_lost_requests
            + (0 if teacher is None else teacher.num_lost_requests),
            retractions=self._pool.num_retractions,
            reward_timeouts=self.grader.num_timeouts,
            reward_errors=self.grader.num_errors,
            environment_errors=dict(self.interaction.errors),
            environment_counts=dict(self.interaction.counts),
        )

    @property
    def _num_waiting(self) -> int:
        """Responses that wait for the teacher, which may take its patience."""
        return 0 if self.grader.teacher is None else self.grader.teacher.num_waiting

    def _describe(self) -> str:
        """Such as ``40/64 groups, 2100 tokens/s``."""
        scheduler = self.scheduler
        new_tokens = self._episodes.generated_tokens - scheduler.before.generated_tokens
        rate = describe_rate(new_tokens, self._started_s)
        num_ready = len(scheduler.selection.ready(scheduler.groups))
        waiting = f", {self._num_waiting} responses wait for the teacher"
        return (
            f"{num_ready}/{self._config.groups_per_step} groups{rate}"
            f"{waiting if self._num_waiting else ''}"
        )
