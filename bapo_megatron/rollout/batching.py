"""Forms the batches: draws prompts, waits for their groups, acts on what ``Selection`` decides.

Where ``async_steps`` is 0, nothing is in flight between two calls of ``collect``; else generation
for later steps goes on, never further ahead than that many.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bapo_megatron.rollout.buffer import DropReason, RolloutBuffer
from bapo_megatron.rollout.buffer_json import buffer_from_json, buffer_to_json
from bapo_megatron.rollout.generation import Generation
from bapo_megatron.rollout.selection import Selection, merge
from bapo_megatron.types import RolloutBatch, RolloutStats

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from typing import Any

    from bapo_megatron.config.rollout import ReplayConfig, RolloutConfig
    from bapo_megatron.data.stream import PromptMixture, PromptStream
    from bapo_megatron.rollout.buffer import PendingGroup
    from bapo_megatron.rollout.engine_pool import EnginePool
    from bapo_megatron.rollout.grading import Grader
    from bapo_megatron.rollout.selection import BatchPlan, LeftOver
    from bapo_megatron.types import SampleText

_REPORT_INTERVAL_S = 0.5


@dataclass(slots=True)
class _Marks:
    """Totals when the work on a batch began; what it cost is counted from here."""

    started_s: float = 0.0
    generated_tokens: int = 0
    resumed_samples: int = 0
    regenerated_samples: int = 0
    lost_requests: int = 0
    reward_timeouts: int = 0
    reward_errors: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Formed:
    """A batch, and what its delivery changes."""

    batch: RolloutBatch
    texts: tuple[SampleText, ...]
    chosen: list[PendingGroup]
    left_over: LeftOver
    totals: _Marks


class BatchCollector:
    """Owns the buffer and the data position; forms one batch after the other."""

    def __init__(
        self,
        grader: Grader,
        prompts: PromptStream | PromptMixture,
        config: RolloutConfig,
        replay: ReplayConfig,
        plan: BatchPlan,
        report: Callable[[str], None],
    ) -> None:
        """Put the parts together; ``attach`` comes before the first batch.

        Args:
            grader: Decodes and scores.
            prompts: Training prompts.
            config: Sizes of batches and groups, and the rules.
            replay: How many groups of earlier batches are trained on again.
            plan: What the run asks of its batches.
            report: Takes a line about the progress, twice a second.
        """
        self._grader = grader
        self._prompts = prompts
        self._config = config
        self._plan = plan
        self._report = report
        self._buffer = RolloutBuffer(num_earlier_batches=replay.batches)
        self._selection = Selection(self._buffer, config, replay, plan)
        self._pool: EnginePool
        self._generation: Generation
        self._num_regenerated = 0
        self._is_paused = False
        self._marks = _Marks()

    def attach(self, pool: EnginePool) -> None:
        """Sample from these servers."""
        self._pool = pool
        self._generation = Generation(pool, self._grader, self._config, self._plan.seed)

    @property
    def finished_samples(self) -> int:
        """Responses that ended so far."""
        return self._generation.finished_samples

    async def close(self) -> None:
        """End every task."""
        await self._generation.close()

    async def collect(
        self,
        step: int,
        hand_over: Callable[[RolloutBatch, Sequence[SampleText]], Awaitable[None]],
    ) -> RolloutBatch | None:
        """Generate and score the batch of ``step``.

        Args:
            step: Counted from 0.
            hand_over: Delivers the batch and its texts. Its groups count as trained only when this
                has returned; where it fails, nothing has changed, and the next call forms the batch
                again.

        Returns:
            The batch; none where no server holds the newest weights any more: push them and repeat
            the call.

        Raises:
            RolloutError: No server could go on.
            RewardError: Grading failed.
        """
        version = self._pool.version
        assert version is not None, "weights are synchronised before the first batch"
        replayed = self._selection.replayed(step, version)
        num_new = self._config.groups_per_step - len(replayed)
        ahead = max(0, self._selection.steps_ahead(step)) * self._config.groups_per_step
        if not self._generation.is_running:
            self._mark()
        self._give_up_stale(version)
        self._go_on(num_new + ahead)
        while not (chosen := self._choose(num_new, replayed)):
            if self._pool.needs_weights:
                return None
            self._report(f"rollout {step}: {self._describe()}")
            await self._wait_for_news()
            self._give_up_stale(version)
            self._go_on(num_new + ahead)
        generation_s = time.monotonic() - self._marks.started_s
        if not ahead:
            await self._generation.stop()
            # Older groups may have got their scores meanwhile: they come first, if young enough.
            self._give_up_stale(version)
            chosen = self._choose(num_new, replayed)
        while not all(group.is_scored for group in chosen):
            await self._wait_for_news()
        formed = self._form(step, version, chosen, replayed, generation_s)
        await hand_over(formed.batch, formed.texts)
        self._commit(formed)
        if ahead:
            self._go_on(ahead)
        return formed.batch

    async def pause(self) -> bool:
        """Make way for new weights; nothing is sampled until ``resume``.

        Returns:
            Whether generation was running.
        """
        if self._generation.is_running:
            self._is_paused = True
            await self._generation.pause()
        return self._is_paused

    async def resume(self) -> None:
        """Go on after ``pause``, with what is young enough for the new weights."""
        if self._is_paused:
            if self._pool.version is not None:
                self._give_up_stale(self._pool.version)
            self._is_paused = False
            await self._generation.resume(self._buffer)

    def leave_out_lost(self, num_requests: int) -> None:
        """Lost requests that do not belong to batches: they were counted during an evaluation."""
        self._marks.lost_requests += num_requests

    def state(self) -> dict[str, Any]:
        """Data position and buffer as JSON values."""
        return {"prompts": self._prompts.state(), "buffer": buffer_to_json(self._buffer)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what ``state`` returned.

        Raises:
            ValueError: It belongs to other data, another seed or other group sizes.
        """
        self._prompts.restore(state["prompts"])
        buffer_from_json(self._buffer, state["buffer"])
        self._marks.dropped = dict(self._buffer.dropped)
        size, longest = self._config.samples_per_group, self._config.max_response_tokens
        earlier = (group for batch in self._buffer.earlier for group in batch)
        for saved in (*self._buffer, *earlier):
            if len(saved.samples) != size:
                raise ValueError(
                    f"rollout.samples_per_group: was {len(saved.samples)} when group "
                    f"{saved.group_id} was saved and is {size} now; resume with the same value"
                )
        for group in self._buffer:
            most = max(pending.num_tokens for pending in group.samples)
            if most > longest:
                raise ValueError(
                    f"rollout.max_response_tokens: must be at least the {most} tokens of a saved "
                    f"sample, got {longest}; resume with the former value"
                )

    def _choose(self, num_new: int, replayed: Sequence[PendingGroup]) -> list[PendingGroup]:
        spent_tokens = self._generation.generated_tokens - self._marks.generated_tokens
        return self._selection.choose(num_new, len(replayed), spent_tokens)

    def _go_on(self, num_groups: int) -> None:
        """Draw prompts for this many batch groups and keep every sample on its way."""
        for _ in range(self._selection.num_to_draw(num_groups)):
            self._buffer.start_group(next(self._prompts), self._config.samples_per_group)
        self._generation.advance(self._buffer)

    def _give_up_stale(self, version: int) -> None:
        """Drop or restart what is older than ``rollout.staleness`` allows."""
        stands_still = self._is_paused or not self._generation.is_running
        for group, old in self._selection.stale_samples(version, unfinished=stands_still):
            if self._config.staleness.action == "drop":
                self._drop(group, DropReason.STALE)
                continue
            for pending in old:
                self._generation.cancel(pending)
                pending.start_again()
            self._num_regenerated += len(old)

    def _drop(self, group: PendingGroup, reason: DropReason) -> None:
        for pending in group.samples:
            self._generation.cancel(pending)
        self._buffer.drop(group, reason)

    async def _wait_for_news(self) -> None:
        """Until a sample has finished or was scored, or for a moment.

        Raises:
            RolloutError: No server could go on.
            RewardError: Grading failed.
        """
        news = self._generation.news
        with contextlib.suppress(TimeoutError):
            # Not wait_for: in Python 3.11 it loses a cancellation that comes with the news.
            async with asyncio.timeout(_REPORT_INTERVAL_S):
                await news.wait()
        news.clear()
        self._generation.raise_failure()

    def _form(
        self,
        step: int,
        version: int,
        chosen: list[PendingGroup],
        replayed: Sequence[PendingGroup],
        generation_s: float,
    ) -> _Formed:
        """The batch, of groups that stay in the buffer until ``_commit``."""
        left_over = self._selection.left_over(chosen)
        totals, before = self._totals(), self._marks
        for _, reason in left_over.given_up:
            totals.dropped[reason] = totals.dropped.get(reason, 0) + 1
        dropped = {
            reason: count - before.dropped.get(reason, 0)
            for reason, count in totals.dropped.items()
            if count > before.dropped.get(reason, 0)
        }
        is_dynamic = self._selection.is_dynamic
        num_filled = sum(is_dynamic and group.has_equal_rewards for group in chosen)
        stats = RolloutStats(
            generated_tokens=totals.generated_tokens - before.generated_tokens,
            generation_s=generation_s,
            resumed_samples=totals.resumed_samples - before.resumed_samples,
            unfinished_samples=left_over.num_unfinished_samples,
            reward_timeouts=totals.reward_timeouts - before.reward_timeouts,
            reward_errors=totals.reward_errors - before.reward_errors,
            replayed_groups=len(replayed),
            equal_reward_groups=dropped.get(DropReason.EQUAL_REWARDS, 0) + num_filled,
            filled_groups=num_filled,
            dropped_groups=dropped,
            regenerated_samples=totals.regenerated_samples - before.regenerated_samples,
            lost_requests=totals.lost_requests - before.lost_requests,
        )
        merged = merge(chosen, replayed)
        groups = tuple(group.to_group() for group in merged)
        texts = tuple(pending.text() for group in merged for pending in group.samples)
        return _Formed(RolloutBatch(step, version, groups, stats), texts, chosen, left_over, totals)

    def _commit(self, formed: _Formed) -> None:
        """The trainer has the batch: its groups leave, and so do those that are given up."""
        self._buffer.take(formed.chosen)
        for group, reason in formed.left_over.given_up:
            self._drop(group, reason)
        for group in formed.left_over.carried:
            group.carries += 1
        self._buffer.check()
        self._marks = formed.totals

    def _totals(self) -> _Marks:
        return _Marks(
            started_s=time.monotonic(),
            generated_tokens=self._generation.generated_tokens,
            resumed_samples=self._generation.resumed_samples,
            regenerated_samples=self._num_regenerated,
            lost_requests=self._pool.num_lost_requests,
            reward_timeouts=self._grader.num_timeouts,
            reward_errors=self._grader.num_errors,
            dropped=dict(self._buffer.dropped),
        )

    def _mark(self) -> None:
        """Generation starts: time counts from now."""
        self._marks.started_s = time.monotonic()

    def _describe(self) -> str:
        """Such as ``40/64 groups, 2100 tokens/s``."""
        duration_s = time.monotonic() - self._marks.started_s
        tokens = self._generation.generated_tokens - self._marks.generated_tokens
        ready = len(self._selection.ready())
        rate = tokens / max(duration_s, 1e-9)
        return f"{ready}/{self._config.groups_per_step} groups, {rate:.0f} tokens/s"
