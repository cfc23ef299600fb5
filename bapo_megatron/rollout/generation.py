"""Collects the batch of one step: keeps requests in flight until enough groups are complete.

What is then unfinished is aborted; with ``rollout.partial`` it stays in the buffer with its tokens,
log-probs and versions and is continued by a later step.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from bapo_megatron.rollout.buffer import RolloutBuffer
from bapo_megatron.rollout.completion import SamplingSettings
from bapo_megatron.types import RolloutBatch, RolloutStats

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from bapo_megatron.config.schema import RolloutConfig
    from bapo_megatron.data.prompts import PromptStream
    from bapo_megatron.rollout.buffer import PendingGroup, PendingSample
    from bapo_megatron.rollout.engine_pool import EnginePool
    from bapo_megatron.rollout.grading import Grader

_REPORT_INTERVAL_S = 0.5


class BatchCollector:
    """Owns the buffer and the data position."""

    def __init__(
        self,
        grader: Grader,
        prompts: PromptStream,
        config: RolloutConfig,
        report: Callable[[str], None],
    ) -> None:
        """Put the parts together.

        Args:
            grader: Decodes and scores.
            prompts: Training prompts.
            config: Batch size, lengths and temperature.
            report: Takes a line about the progress, twice a second.
        """
        self._grader = grader
        self._prompts = prompts
        self._config = config
        self._report = report
        self._buffer = RolloutBuffer()

    async def collect(self, pool: EnginePool, step: int) -> RolloutBatch:
        """Generate and score the batch of ``step``.

        Args:
            pool: Servers that hold the newest weights.
            step: Number of the training step.

        Raises:
            RolloutError: A server failed (inside an exception group).
            RewardError: Grading failed (inside an exception group).
        """
        version = pool.version
        assert version is not None, "weights are synchronised before the first batch"
        self._admit_prompts()
        attempt = _Attempt(pool, self._grader, self._config)
        rewards_timed_out_before = self._grader.num_timeouts
        pool.reopen()
        async with asyncio.TaskGroup() as tasks:
            for group in self._buffer:
                attempt.start(group, tasks)
            await self._report_until_complete(attempt, step)
            await pool.drain()
        groups = self._buffer.take(self._buffer.finished()[: self._config.groups_per_step])
        if not self._config.partial:
            self._buffer.discard_all()
        stats = RolloutStats(
            generated_tokens=attempt.generated_tokens,
            generation_s=attempt.generation_s,
            resumed_samples=attempt.resumed_samples,
            unfinished_samples=self._buffer.num_unfinished_samples(),
            reward_timeouts=self._grader.num_timeouts - rewards_timed_out_before,
        )
        return RolloutBatch(step=step, version=version, groups=groups, stats=stats)

    def state(self) -> dict[str, Any]:
        """Data position and buffer as JSON values."""
        return {"prompts": self._prompts.state(), "buffer": self._buffer.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what ``state`` returned.

        Raises:
            ValueError: It belongs to other data, another seed or other group sizes.
        """
        self._prompts.restore(state["prompts"])
        self._buffer.restore(state["buffer"])
        size, longest = self._config.samples_per_group, self._config.max_response_tokens
        for group in self._buffer:
            if len(group.samples) != size:
                raise ValueError(
                    f"rollout.samples_per_group: was {len(group.samples)} when unfinished samples "
                    f"were saved and is {size} now; resume with the same value"
                )
            most = max(pending.num_tokens for pending in group.samples)
            if most > longest:
                raise ValueError(
                    f"rollout.max_response_tokens: must be at least the {most} tokens of a saved "
                    f"sample, got {longest}; resume with the former value"
                )

    def _admit_prompts(self) -> None:
        """Draw prompts until buffered and new groups are as many as may be in flight."""
        wanted = self._config.groups_per_step + self._config.oversample_groups
        while len(self._buffer) < wanted:
            self._buffer.start_group(next(self._prompts), self._config.samples_per_group)

    async def _report_until_complete(self, attempt: _Attempt, step: int) -> None:
        while not attempt.is_complete.is_set():
            self._report(f"rollout {step}: {attempt.describe()}")
            try:
                await asyncio.wait_for(attempt.is_complete.wait(), _REPORT_INTERVAL_S)
            except TimeoutError:
                continue


class _Attempt:
    """The work on one batch and its counts."""

    def __init__(self, pool: EnginePool, grader: Grader, config: RolloutConfig) -> None:
        self._pool = pool
        self._grader = grader
        self._config = config
        self._started_s = time.monotonic()
        self._finished_groups = 0
        self.is_complete = asyncio.Event()
        self.generated_tokens = 0
        self.generation_s = 0.0
        self.resumed_samples = 0

    def start(self, group: PendingGroup, tasks: asyncio.TaskGroup) -> None:
        """Create a task for each sample that needs tokens or a score."""
        if group.is_finished:
            self._count_finished_group()
        for pending in group.samples:
            if not pending.is_scored:
                tasks.create_task(self._advance(pending, group))

    def describe(self) -> str:
        """Such as ``40/64 groups, 2100 tokens/s``."""
        rate = self.generated_tokens / max(time.monotonic() - self._started_s, 1e-9)
        return f"{self._finished_groups}/{self._config.groups_per_step} groups, {rate:.0f} tokens/s"

    async def _advance(self, pending: PendingSample, group: PendingGroup) -> None:
        """Sample until the response ends or the pool is drained; score what has ended."""
        if pending.is_finished or await self._sample(pending, group):
            await self._grader.score(pending)

    async def _sample(self, pending: PendingSample, group: PendingGroup) -> bool:
        """Let the engine continue a response; returns whether it has ended."""
        config, sample = self._config, pending.sample
        was_started = pending.num_tokens > 0
        completion = await self._pool.generate(
            pending.input_ids(),
            SamplingSettings(
                temperature=config.temperature,
                max_new_tokens=config.max_response_tokens - pending.num_tokens,
            ),
            label=f"sample {sample.index} of group {sample.group_id}, {sample.prompt.prompt_id}",
            affinity=sample.group_id,
        )
        if completion is None:
            return False
        pending.append(completion, config.max_response_tokens)
        self.generated_tokens += len(completion.token_ids)
        self.resumed_samples += was_started
        if group.is_finished:
            self._count_finished_group()
        return pending.is_finished

    def _count_finished_group(self) -> None:
        self._finished_groups += 1
        if self._finished_groups == self._config.groups_per_step:
            self.generation_s = time.monotonic() - self._started_s
            self.is_complete.set()
