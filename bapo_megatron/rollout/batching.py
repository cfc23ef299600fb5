"""Forms the batches: draws prompts, waits for their groups, acts on what ``Selection`` decides.

Where ``async_steps`` is 0, nothing is in flight between two calls of ``collect``; else generation
for later steps goes on, never further ahead than that many. With ``fixed_lag``, and with an engine
that is driven (``driving``), it goes on to an end of its own, which every later call waits for.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from bapo_megatron.engine.base import SamplingSettings, sample_seed
from bapo_megatron.errors import RolloutError
from bapo_megatron.rollout.buffer import DropReason, RolloutBuffer, buffer_from_json, buffer_to_json
from bapo_megatron.rollout.driving import BURST, Driver, reporting, wait_for_news
from bapo_megatron.rollout.episodes import EpisodePlan, Episodes
from bapo_megatron.rollout.selection import Selection, merge
from bapo_megatron.types import RolloutBatch, RolloutStats

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from bapo_megatron.config.rollout import ReplayConfig, RolloutConfig
    from bapo_megatron.data.stream import PromptMixture, PromptStream
    from bapo_megatron.rollout.buffer import PendingGroup, PendingSample
    from bapo_megatron.rollout.episodes import Interaction
    from bapo_megatron.rollout.grading import Grader
    from bapo_megatron.rollout.pool import EnginePool
    from bapo_megatron.rollout.selection import BatchPlan, LeftOver
    from bapo_megatron.types import SampleText


@dataclass(frozen=True, slots=True)
class _Totals:
    """What was counted so far; what a batch cost is the difference from the batch before."""

    generated_tokens: int = 0
    resumed_samples: int = 0
    regenerated_samples: int = 0
    lost_requests: int = 0
    reward_timeouts: int = 0
    reward_errors: int = 0
    environment_errors: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)

    def since(self, before: _Totals) -> _Totals:
        """What was counted after ``before``."""

        def difference(now: Any, then: Any) -> Any:
            if not isinstance(now, dict):
                return now - then
            differences = {key: now.get(key, 0) - then.get(key, 0) for key in {**then, **now}}
            return {key: n for key, n in sorted(differences.items()) if n}

        return _Totals(
            **{
                f.name: difference(getattr(self, f.name), getattr(before, f.name))
                for f in fields(self)
            }
        )


@dataclass(frozen=True, slots=True)
class _Formed:
    """A batch, and what its delivery changes."""

    batch: RolloutBatch
    texts: tuple[SampleText, ...]
    chosen: list[PendingGroup]
    left_over: LeftOver
    totals: _Totals
    at_s: float


class BatchCollector:
    """Owns the buffer and the data position; forms one batch after the other."""

    def __init__(
        self,
        interaction: Interaction,
        grader: Grader,
        prompts: PromptStream | PromptMixture,
        config: RolloutConfig,
        replay: ReplayConfig,
        plan: BatchPlan,
        report: Callable[[str], None],
    ) -> None:
        """Put the parts together; ``attach`` comes before the first batch.

        Args:
            interaction: Answers the policy's turns.
            grader: Decodes and scores.
            prompts: Training prompts.
            config: Sizes of batches and groups, and the rules.
            replay: How many groups of earlier batches are trained on again.
            plan: What the run asks of its batches.
            report: Takes a line about the progress, twice a second.
        """
        self._interaction = interaction
        self._grader = grader
        self._prompts = prompts
        self._config = config
        self._plan = plan
        self._report = report
        self._buffer = RolloutBuffer(num_earlier_batches=replay.batches)
        self._selection = Selection(self._buffer, config, replay, plan)
        self._pool: EnginePool
        self._episodes: Episodes
        self._is_attached = False
        self._driver: Driver | None = None
        self._ahead: asyncio.Task[None] | None = None
        """Generates until an end of its own; its failure is that of the next ``collect``."""
        self._sampled_version: int | None = None
        """Weights that sampled last."""
        self._num_regenerated = 0
        self._is_paused = False
        self._started_s = 0.0
        self._before = _Totals()
        """When the last batch was formed."""

    def attach(self, pool: EnginePool) -> None:
        """Sample from these servers."""
        self._pool, self._is_attached = pool, True
        self._episodes = Episodes(pool, self._interaction, self._grader, self._plan_of)
        if pool.stepper is not None:
            self._driver = Driver(
                pool.stepper,
                pool,
                self._episodes.is_settled,
                self._episodes.news,
                awaits_scores=self._selection.needs_scores,
            )

    @property
    def finished_samples(self) -> int:
        """Responses that ended so far."""
        return self._episodes.finished_samples

    async def close(self) -> None:
        """End every task."""
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)
        await self._episodes.close()

    async def wait_for_ahead(self) -> None:
        """Wait until what is generated ahead has come to its end, if it has one.

        A push, a checkpoint and an evaluation come after it, so that what they find was counted.
        """
        if self._ahead is not None:
            await asyncio.wait([self._ahead])

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
        has_end = self._driver is not None or self._config.fixed_lag is not None
        if not self._episodes.is_running and self._ahead is None:
            self._started_s = time.monotonic()  # generation starts: time counts from now
        with reporting(lambda: self._report(f"rollout {step}: {self._describe()}")):
            await self._end_ahead()
            self._check_lag(step, num_new, version)
            num_wanted = num_new if self._config.fixed_lag is not None else num_new + ahead
            self._give_up_stale(version)
            self._go_on(num_wanted)
            while not (chosen := self._choose(num_new, replayed)):
                if self._pool.needs_weights:
                    return None
                await self._advance()
                self._give_up_stale(version)
                self._go_on(num_wanted)
            generation_s = time.monotonic() - self._started_s
            if not ahead:
                await self._stop()
                # Older groups may have got their scores meanwhile: they come first, if young
                # enough.
                self._give_up_stale(version)
                chosen = self._choose(num_new, replayed)
            if self._driver is not None:
                await self._driver.settle()  # whose scores are counted must not depend on graders
            while not all(group.is_scored for group in chosen):
                await self._advance()
        formed = self._form(step, version, chosen, replayed, generation_s)
        await hand_over(formed.batch, formed.texts)
        self._commit(formed)
        if ahead and has_end:
            self._ahead = asyncio.create_task(self._generate_ahead(ahead, version))
        elif ahead:
            self._go_on(ahead)
        return formed.batch

    async def pause(self) -> bool:
        """Make way for new weights; nothing is sampled until ``resume``.

        Returns:
            Whether generation was running.
        """
        await self.wait_for_ahead()
        if self._episodes.is_running:
            self._is_paused = True
            await self._episodes.pause(self._config.weight_sync)
        return self._is_paused

    async def resume(self) -> None:
        """Go on after ``pause``, with what is young enough for the new weights."""
        if self._is_paused:
            if self._pool.version is not None:
                self._give_up_stale(self._pool.version)
            self._is_paused = False
            await self._episodes.resume(self._buffer)

    def leave_out_lost(self, num_requests: int) -> None:
        """Lost requests that do not belong to batches: they were counted during an evaluation."""
        lost = self._before.lost_requests + num_requests
        self._before = replace(self._before, lost_requests=lost)

    def state(self) -> dict[str, Any]:
        """Data position, buffer, and what was counted since the last batch, as JSON values."""
        return {
            "prompts": self._prompts.state(),
            "buffer": buffer_to_json(self._buffer),
            "counted": asdict(self._totals().since(self._before)),
            "sampled_version": self._sampled_version,
            "fixed_lag": self._config.fixed_lag,
            "environment": self._config.environment,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what ``state`` returned.

        Raises:
            ValueError: It belongs to other data, another seed or other group sizes.
        """
        self._prompts.restore(state["prompts"])
        buffer_from_json(self._buffer, state["buffer"])
        nothing = _Totals(dropped=dict(self._buffer.dropped))
        self._before = nothing.since(_Totals(**state["counted"]))
        self._sampled_version = state["sampled_version"]
        for name in ("fixed_lag", "environment"):
            value = getattr(self._config, name)
            if state[name] != value:
                raise ValueError(
                    f"rollout.{name}: was {state[name]} when the samples were saved and is {value} "
                    "now; resume with the same value"
                )
        for group in self._buffer:
            if self._grader.sees_groups and not group.is_scored:
                group.start_again((), sees_groups=True)  # as other reward functions left it
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

    def _plan_of(self, pending: PendingSample) -> EpisodePlan:
        sample, config = pending.sample, self._config
        return EpisodePlan(
            SamplingSettings(
                temperature=config.temperature,
                max_new_tokens=config.max_response_tokens,
                seed=sample_seed(self._plan.seed, sample.group_id, sample.index),
            ),
            label=f"sample {sample.index} of group {sample.group_id}, {sample.prompt.prompt_id}",
            order=(sample.group_id, sample.index),
        )

    def _choose(self, num_new: int, replayed: Sequence[PendingGroup]) -> list[PendingGroup]:
        spent_tokens = self._episodes.generated_tokens - self._before.generated_tokens
        return self._selection.choose(num_new, len(replayed), spent_tokens)

    def _go_on(self, num_groups: int) -> None:
        """Draw prompts for this many batch groups and keep every sample on its way."""
        for _ in range(self._selection.num_to_draw(num_groups)):
            self._buffer.start_group(next(self._prompts), self._config.samples_per_group)
        self._episodes.advance(self._buffer)

    def _give_up_stale(self, version: int) -> None:
        """Drop or restart what is older than ``rollout.staleness`` allows."""
        stands_still = self._is_paused or not self._episodes.is_running
        for group, old in self._selection.stale_samples(version, unfinished=stands_still):
            if self._config.staleness.action == "drop":
                self._drop(group, DropReason.STALE)
                continue
            for pending in old:
                self._episodes.cancel(pending)
            group.start_again(old, sees_groups=self._grader.sees_groups)
            self._num_regenerated += len(old)

    def _drop(self, group: PendingGroup, reason: DropReason) -> None:
        for pending in group.samples:
            self._episodes.cancel(pending)
        self._buffer.drop(group, reason)

    async def _advance(self) -> None:
        """Until there is something to decide on, or for a moment.

        Raises:
            RolloutError: No server could go on.
            RewardError: Grading failed.
        """
        if self._driver is not None:
            await self._driver.drive(BURST)
            return
        await wait_for_news(self._episodes.news)
        self._episodes.raise_failure()

    async def _stop(self) -> None:
        await self._episodes.stop()
        if self._driver is not None:
            await self._driver.settle()

    async def _generate_ahead(self, num_groups: int, version: int) -> None:
        """Generate for later steps beside the training, and end by oneself, with nothing in flight.

        With a fixed lag all groups are completed by the weights that are there; an engine that is
        driven makes a fixed number of decode steps, or fewer where no request is left.
        """
        try:
            self._go_on(num_groups)
            if self._config.fixed_lag is not None:
                while not all(group.is_finished for group in self._buffer):
                    if self._pool.needs_weights:
                        break  # ``_check_lag`` says it, unless the same weights come again
                    await self._advance()
            else:
                assert self._driver is not None, "others go on until they are paused"
                remaining = self._config.decode_steps_ahead
                while remaining and (made := await self._driver.drive(min(BURST, remaining))):
                    remaining -= made
                    self._give_up_stale(version)
                    self._go_on(num_groups)
            await self._stop()
        except Exception:
            # A push, an evaluation and a checkpoint may come before the failure is told.
            await self._episodes.stop()
            raise

    async def _end_ahead(self) -> None:
        """Wait for what was generated ahead.

        Raises:
            RolloutError: No server could go on.
            RewardError: Grading failed.
        """
        await self.wait_for_ahead()
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            ahead.result()

    def _check_lag(self, step: int, num_new: int, version: int) -> None:
        """With a fixed lag, the weights that began responses continue them, as far ahead as asked.

        Raises:
            RolloutError: They are gone, or nothing was generated ahead.
        """
        sampled, self._sampled_version = self._sampled_version, version
        if self._config.fixed_lag is None:
            return
        unfinished = sum(not group.is_finished for group in self._buffer)
        if unfinished and sampled not in (None, version):
            self._sampled_version = sampled
            raise RolloutError(
                "rollout.fixed_lag: all groups must be complete before new weights are pushed, got "
                f"{unfinished} unfinished ones of version {sampled} with version {version}: no "
                "engine held these weights any more; continue from an earlier checkpoint, or "
                "without rollout.fixed_lag"
            )
        if step > 0 and self._selection.num_to_draw(num_new):
            raise RolloutError(
                f"rollout.fixed_lag: the groups of step {step} must have been sampled "
                f"{self._config.fixed_lag} steps before, got {len(self._buffer)} in the "
                "checkpoint; resume with the train.steps of the run that saved it"
            )

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
        given_up = Counter(reason.value for _, reason in left_over.given_up)
        totals = self._totals(given_up)
        new = totals.since(self._before)
        is_dynamic = self._selection.is_dynamic
        num_filled = sum(is_dynamic and group.has_equal_rewards for group in chosen)
        stats = RolloutStats(
            generated_tokens=new.generated_tokens,
            generation_s=generation_s,
            resumed_samples=new.resumed_samples,
            unfinished_samples=left_over.num_unfinished_samples,
            reward_timeouts=new.reward_timeouts,
            reward_errors=new.reward_errors,
            environment_errors=new.environment_errors if self._config.has_environment else None,
            replayed_groups=len(replayed),
            equal_reward_groups=new.dropped.get(DropReason.EQUAL_REWARDS, 0) + num_filled,
            filled_groups=num_filled,
            dropped_groups=new.dropped,
            regenerated_samples=new.regenerated_samples,
            lost_requests=new.lost_requests,
        )
        merged = merge(chosen, replayed)
        groups = tuple(group.to_group() for group in merged)
        texts = tuple(pending.text() for group in merged for pending in group.samples)
        return _Formed(
            RolloutBatch(step, version, groups, stats),
            texts,
            chosen,
            left_over,
            totals,
            time.monotonic(),
        )

    def _commit(self, formed: _Formed) -> None:
        """The trainer has the batch: its groups leave, and so do those that are given up."""
        self._buffer.take(formed.chosen)
        for group, reason in formed.left_over.given_up:
            self._drop(group, reason)
        for group in formed.left_over.carried:
            group.carries += 1
        self._buffer.check()
        self._before, self._started_s = formed.totals, formed.at_s

    def _totals(self, given_up: Mapping[str, int] | None = None) -> _Totals:
        """What was counted so far; ``given_up`` counts as dropped."""
        dropped = dict(self._buffer.dropped + Counter(given_up))
        if not self._is_attached:
            return _Totals(dropped=dropped)
        return _Totals(
            generated_tokens=self._episodes.generated_tokens,
            resumed_samples=self._episodes.resumed_samples,
            regenerated_samples=self._num_regenerated,
            lost_requests=self._pool.num_lost_requests,
            reward_timeouts=self._grader.num_timeouts,
            reward_errors=self._grader.num_errors,
            environment_errors=dict(self._interaction.errors),
            dropped=dropped,
        )

    def _describe(self) -> str:
        """Such as ``40/64 groups, 2100 tokens/s``."""
        duration_s = time.monotonic() - self._started_s
        tokens = self._episodes.generated_tokens - self._before.generated_tokens
        ready = len(self._selection.ready())
        rate = tokens / max(duration_s, 1e-9)
        return f"{ready}/{self._config.groups_per_step} groups, {rate:.0f} tokens/s"
