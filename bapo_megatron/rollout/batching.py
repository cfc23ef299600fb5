"""Forms the batches: draws prompts, waits for their groups, acts on what ``Selection`` decides.

With ``async_steps`` 0, nothing is in flight between two calls of ``collect``; otherwise generation
runs at most that many steps ahead. With ``fixed_lag``, or an engine that is driven (``episodes``),
it stops by itself, and every later call waits until it has.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from bapo_megatron.config.rollout import ReplayConfig, RolloutConfig
from bapo_megatron.data.stream import PromptMixture
from bapo_megatron.engine.base import GenerateRequest, SamplingSettings, sample_seed
from bapo_megatron.errors import RolloutError
from bapo_megatron.rollout.buffer import (
    DropReason,
    PendingGroup,
    PendingSample,
    RolloutBuffer,
)
from bapo_megatron.rollout.episodes import BURST, Episodes, Interaction
from bapo_megatron.rollout.grading import Grader
from bapo_megatron.rollout.limits import LoopLag
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.rollout.saved import RolloutState, SavedRollout, Totals
from bapo_megatron.rollout.selection import BatchPlan, LeftOver, Selection, merge
from bapo_megatron.telemetry.console import describe_rate, reporting
from bapo_megatron.types import RolloutBatch, RolloutStats, SampleText


@dataclass(eq=False)
class BatchCollector:
    """Owns the buffer and the data position; forms the batches in order."""

    interaction: Interaction
    grader: Grader
    prompts: PromptMixture
    config: RolloutConfig
    replay: ReplayConfig
    plan: BatchPlan
    report: Callable[[str], None]
    is_interrupted: bool = False
    """End ``collect`` at once, as if no server held the weights; the buffer keeps all."""
    _is_attached: bool = False
    _pool: EnginePool = field(init=False)
    _episodes: Episodes = field(init=False)
    _ahead: asyncio.Task[None] | None = None
    """Generates until an end of its own; its failure is that of the next ``collect``."""
    _sampled_version: int | None = None
    """Version of the weights that sampled last."""
    _num_regenerated: int = 0
    _is_paused: bool = False
    _started_s: float = 0.0
    _spent_s: float = 0.0
    """Generation of the batch before an interruption, maybe in an earlier process."""
    _before: Totals = field(default_factory=Totals)
    """As of the last batch."""
    _loop_lag: LoopLag = field(default_factory=LoopLag)

    def __post_init__(self) -> None:
        self._buffer = RolloutBuffer(num_earlier_batches=self.replay.batches)
        self._selection = Selection(self._buffer, self.config, self.replay, self.plan)

    def attach(self, pool: EnginePool) -> None:
        """Sample from this pool; must be called before the first batch."""
        self._pool, self._is_attached = pool, True
        self._episodes = Episodes(
            pool,
            self.interaction,
            self.grader,
            self._request_of,
            awaits_scores=self._selection.needs_scores,
        )

    @property
    def finished_samples(self) -> int:
        """Responses that ended so far."""
        return self._episodes.finished_samples

    async def close(self) -> None:
        """End every task."""
        self._loop_lag.stop()
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)
        await self._episodes.close()

    async def wait_for_ahead(self) -> None:
        """Wait until what is generated ahead has ended, if it ends by itself.

        A push, a checkpoint and an evaluation come after it, so that what they find was counted.
        """
        if self._ahead is not None:
            await asyncio.wait([self._ahead])

    async def collect(
        self, step: int, hand_over: Callable[[RolloutBatch, Sequence[SampleText]], Awaitable[None]]
    ) -> RolloutBatch | None:
        """Generate and score the batch of ``step`` (1, 2, …), and hand it over with its texts.

        Its groups count as trained only when ``hand_over`` has returned; where that fails, nothing
        has changed, and the next call forms the batch again. Returns none where no server holds the
        newest weights any more: push them and repeat the call.

        Raises:
            RolloutError: No server could go on.
            RewardError: Grading failed.
        """
        version = self._pool.states.version
        assert version is not None, "weights are synchronised before the first batch"
        self._loop_lag.start()
        replayed = self._selection.replayed(step, version)
        num_new = self.config.groups_per_step - len(replayed)
        num_ahead = self._selection.steps_ahead(step) * self.config.groups_per_step
        if not self._episodes.is_running and self._ahead is None:
            # Generation starts, or goes on after an interruption: time counts from now.
            self._started_s, self._spent_s = time.monotonic() - self._spent_s, 0.0
        with reporting(lambda: self.report(f"rollout {step}: {self._describe()}")):
            generated = await self._generate(step, version, num_new, num_ahead)
        if generated is None:
            if not self._episodes.is_running:
                self._spent_s = time.monotonic() - self._started_s
            return None
        chosen, generation_s = generated
        left_over = self._selection.left_over(chosen)
        carried = [group for group, reason in left_over if reason is None and group.is_underway]
        totals, formed_s = self._totals(left_over), time.monotonic()
        groups = merge(chosen, replayed)
        stats = self._stats(totals, chosen, len(replayed), left_over, generation_s)
        batch = RolloutBatch(step, version, tuple(group.to_group() for group in groups), stats)
        await hand_over(batch, [pending.text() for group in groups for pending in group.samples])
        self._commit(chosen, left_over, carried)
        self._before, self._started_s = totals, formed_s
        if num_ahead:
            self._start_ahead(num_ahead, version)
        return batch

    async def pause(self) -> bool:
        """Make way for new weights until ``resume``; returns whether generation was running."""
        await self.wait_for_ahead()
        if self._episodes.is_running:
            self._is_paused = True
            await self._episodes.pause(self.config.weight_sync)
        return self._is_paused

    async def resume(self) -> None:
        """Go on after ``pause``, with what is young enough for the new weights."""
        if self._is_paused:
            if self._pool.states.version is not None:
                self._give_up_stale(self._pool.states.version)
            self._is_paused = False
            await self._episodes.resume(self._buffer)

    def state(self) -> SavedRollout:
        """Data position, buffer, and what was counted since the last batch, as they are now."""
        spent_s = self._spent_s
        if self._is_attached and (self._episodes.is_running or self._ahead is not None):
            spent_s = time.monotonic() - self._started_s
        about = RolloutState(
            prompts=self.prompts.state(),
            generation_s=spent_s,
            counted=self._totals().since(self._before),
            sampled_version=self._sampled_version,
            fixed_lag=self.config.fixed_lag,
            partial_tokens=self.config.partial_tokens,
            environment=self.config.environment,
        )
        return SavedRollout(about, self._buffer.snapshot())

    def restore(self, saved: SavedRollout) -> None:
        """Continue from what ``state`` returned, whose groups it takes over.

        Raises:
            ValueError: It belongs to other data, another seed or other group sizes.
        """
        about = saved.about
        self.prompts.restore(about.prompts)
        self._buffer.restore(saved.buffer)
        self._before = self._totals().since(about.counted)
        self._spent_s, self._sampled_version = about.generation_s, about.sampled_version
        saved.check(self.config)
        for group in self._buffer:
            if self.grader.sees_groups and not group.is_scored:
                group.start_again((), sees_groups=True)  # as other reward functions left it

    def _request_of(self, pending: PendingSample) -> GenerateRequest:
        """The request for a sample's whole response."""
        sample, prompt, config = pending.sample, pending.prompt, self.config
        return GenerateRequest(
            input_ids=prompt.token_ids,
            sampling=SamplingSettings(
                temperature=config.temperature,
                max_new_tokens=config.max_response_tokens,
                seed=sample_seed(self.plan.seed, sample.group_id, sample.index),
            ),
            label=f"sample {sample.index} of group {sample.group_id}, {prompt.prompt_id}",
            order=(sample.group_id, sample.index),
        )

    async def _generate(
        self, step: int, version: int, num_new: int, num_ahead: int
    ) -> tuple[list[PendingGroup], float] | None:
        """Generate until a batch's new groups are scored; returns them and the seconds, or none."""

        def choose() -> list[PendingGroup]:
            num_replayed = self.config.groups_per_step - num_new
            return self._selection.choose(num_new, num_replayed, self._new_tokens)

        await self._end_ahead()
        self._check_lag(step, num_new, version)
        num_wanted = num_new if self.config.fixed_lag is not None else num_new + num_ahead
        while True:
            self._give_up_stale(version)
            self._go_on(num_wanted)
            if choose():
                break
            if self.is_interrupted:
                await self._stop()
            if self._pool.states.needs_weights or self.is_interrupted:
                return None
            await self._episodes.wait_for_change()
        generation_s = time.monotonic() - self._started_s
        if not num_ahead:
            await self._stop()
            # Older groups may have got their scores meanwhile: they come first, if still young.
            self._give_up_stale(version)
        chosen = choose()
        await self._episodes.settle()  # whose scores are counted must not depend on graders
        while not all(group.is_scored for group in chosen):
            await self._episodes.wait_for_change()
        return chosen, generation_s

    def _go_on(self, num_groups: int) -> None:
        """Draw prompts for this many batch groups and keep every sample on its way."""
        for _ in range(num_prompts := self._selection.num_to_draw(num_groups)):
            self._buffer.start_group(next(self.prompts), self.config.samples_per_group)
        if num_prompts and self.config.partial_tokens is not None:
            self._buffer.begin_round(self.config.partial_tokens)
        self._episodes.advance(self._buffer)

    def _give_up_stale(self, version: int) -> None:
        """Drop or restart what is older than ``rollout.staleness`` allows."""
        stands_still = self._is_paused or not self._episodes.is_running
        for group, old in self._selection.stale_samples(version, unfinished=stands_still):
            if self.config.staleness.action == "drop":
                self._drop(group, DropReason.STALE)
                continue
            for pending in old:
                self._episodes.cancel(pending)
            group.start_again(old, sees_groups=self.grader.sees_groups)
            self._num_regenerated += len(old)

    def _drop(self, group: PendingGroup, reason: DropReason) -> None:
        for pending in group.samples:
            self._episodes.cancel(pending)
        self._buffer.drop(group, reason)

    async def _stop(self) -> None:
        await self._episodes.stop()
        await self._episodes.settle()

    def _start_ahead(self, num_groups: int, version: int) -> None:
        if self.config.fixed_lag is not None or self._pool.stepper is not None:
            self._ahead = asyncio.create_task(self._generate_ahead(num_groups, version))
        else:
            self._go_on(num_groups)

    async def _generate_ahead(self, num_groups: int, version: int) -> None:
        """Generate for later steps beside the training; end by itself, with nothing in flight.

        With a fixed lag all groups are completed by the weights that are there; an engine that is
        driven makes a fixed number of decode steps, or fewer where no request is left.
        """
        try:
            self._go_on(num_groups)
            if self.config.fixed_lag is not None:
                while not all(group.is_finished for group in self._buffer):
                    if self._pool.states.needs_weights:
                        break  # ``_check_lag`` says it, unless the same weights come again
                    await self._episodes.wait_for_change()
            else:
                remaining = self.config.decode_steps_ahead
                while remaining and (made := await self._episodes.drive(min(BURST, remaining))):
                    remaining -= made
                    self._give_up_stale(version)
                    self._go_on(num_groups)
            await self._stop()
        except Exception:
            # A push, an evaluation and a checkpoint may come before the failure is told.
            await self._episodes.stop()
            raise

    async def _end_ahead(self) -> None:
        """Wait for what was generated ahead, and raise its failure."""
        await self.wait_for_ahead()
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            ahead.result()

    def _check_lag(self, step: int, num_new: int, version: int) -> None:
        """With a fixed lag, the weights that began responses must also have completed them."""
        sampled, self._sampled_version = self._sampled_version, version
        if self.config.fixed_lag is None:
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
        if step > 1 and self._selection.num_to_draw(num_new):
            raise RolloutError(
                f"rollout.fixed_lag: the groups of step {step} must have been sampled "
                f"{self.config.fixed_lag} steps before, got {len(self._buffer)} in the "
                "checkpoint; resume with the train.steps of the run that saved it"
            )

    def _stats(
        self,
        totals: Totals,
        chosen: Sequence[PendingGroup],
        num_replayed: int,
        left_over: LeftOver,
        generation_s: float,
    ) -> RolloutStats:
        new = totals.since(self._before)
        num_filled = sum(map(self._selection.is_useless, chosen))
        staying = [group for group, reason in left_over if reason is None]
        return RolloutStats(
            generated_tokens=new.generated_tokens,
            generation_s=generation_s,
            resumed_samples=new.resumed_samples,
            unfinished_samples=sum(group.num_unfinished_samples for group in staying),
            reward_timeouts=new.reward_timeouts,
            reward_errors=new.reward_errors,
            environment_errors=new.environment_errors if self.config.has_environment else None,
            replayed_groups=num_replayed,
            equal_reward_groups=new.dropped.get(DropReason.EQUAL_REWARDS, 0) + num_filled,
            filled_groups=num_filled,
            dropped_groups=new.dropped,
            regenerated_samples=new.regenerated_samples,
            lost_requests=new.lost_requests,
            retractions=new.retractions,
            engine_load=self._pool.states.take_load(),
            loop_lag_s=self._loop_lag.take_max(),
        )

    def _commit(
        self, chosen: Sequence[PendingGroup], left_over: LeftOver, carried: Sequence[PendingGroup]
    ) -> None:
        """The trainer has the batch: its groups leave, and so do those that are given up."""
        self._buffer.take(chosen)
        for group, reason in left_over:
            if reason is not None:
                self._drop(group, reason)
        for group in carried:
            group.carries += 1
        self._buffer.check()

    def _totals(self, left_over: LeftOver = ()) -> Totals:
        """What was counted so far; groups that are given up count as dropped."""
        given_up = Counter(reason.value for _, reason in left_over if reason is not None)
        dropped = dict(self._buffer.dropped + given_up)
        if not self._is_attached:
            return Totals(dropped=dropped)
        return Totals(
            generated_tokens=self._episodes.generated_tokens,
            resumed_samples=self._episodes.resumed_samples,
            regenerated_samples=self._num_regenerated,
            lost_requests=self._pool.num_lost_requests,
            retractions=self._pool.num_retractions,
            reward_timeouts=self.grader.num_timeouts,
            reward_errors=self.grader.num_errors,
            environment_errors=dict(self.interaction.errors),
            dropped=dropped,
        )

    @property
    def _new_tokens(self) -> int:
        return self._episodes.generated_tokens - self._before.generated_tokens

    def _describe(self) -> str:
        """Such as ``40/64 groups, 2100 tokens/s``."""
        rate = describe_rate(self._new_tokens, self._started_s)
        ready = len(self._selection.ready())
        return f"{ready}/{self.config.groups_per_step} groups{rate}"
