"""Forms batches: draws prompts, waits for their groups, applies the decisions of ``Selection``.

With ``async_steps`` 0, nothing is in flight between two calls of ``collect``; otherwise generation
runs at most that many steps ahead. With ``fixed_lag``, or an engine with a stepper (``episodes``),
generation ahead ends by itself, and every later call waits for that.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from bapo_megatron.config.rollout import ReplayConfig, RolloutConfig
from bapo_megatron.data.stream import PromptMixture
from bapo_megatron.engine.base import GenerateRequest, SamplingSettings, sample_seed
from bapo_megatron.errors import RolloutError
from bapo_megatron.rollout.buffer import (
    BatchPlan,
    DropReason,
    Episode,
    LeftOver,
    PendingGroup,
    RolloutBuffer,
    Selection,
    merge,
)
from bapo_megatron.rollout.episodes import BURST, Episodes, Interaction
from bapo_megatron.rollout.grading import Grader
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.rollout.saved import RolloutState, SavedRollout, settings_of
from bapo_megatron.telemetry.console import describe_rate, reporting
from bapo_megatron.telemetry.metrics import is_right
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
    """Owns the buffer and the data position; forms the batches in order."""

    interaction: Interaction
    grader: Grader
    prompts: PromptMixture
    config: RolloutConfig
    replay: ReplayConfig
    plan: BatchPlan
    report: Callable[[str], None]
    wants_routes: bool = field(default=False, kw_only=True)
    """Whether the trainer needs the experts that engines choose (``algorithm.router_replay``)."""
    loop_lag: LoopLag = field(default_factory=LoopLag)
    is_interrupted: bool = False
    """End ``collect`` at once, as if no server held the weights; the buffer keeps everything."""
    _is_attached: bool = False
    _pool: EnginePool = field(init=False)
    _episodes: Episodes = field(init=False)
    _ahead: asyncio.Task[None] | None = None
    """Generates ahead, if anything; the next ``collect`` raises its failure."""
    _sampled_version: int | None = None
    """Version of the weights that sampled last."""
    _num_regenerated: int = 0
    _is_paused: bool = False
    _started_s: float = 0.0
    _spent_s: float = 0.0
    """Generation time of the batch before an interruption, possibly in an earlier process."""
    _before: RolloutStats = field(default_factory=RolloutStats)
    """Counters as of the last batch."""

    def __post_init__(self) -> None:
        self._buffer = RolloutBuffer(deque(maxlen=self.replay.batches))
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
            gives_up=self._leaves_teacher,
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
        replayed = self._selection.replayed(step, version)
        num_new = self.config.groups_per_step - len(replayed)
        num_ahead = self._selection.steps_ahead(step) * self.config.groups_per_step
        if not self._episodes.is_running and self._ahead is None:
            # Generation starts, or continues after an interruption: restart the clock.
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
        await hand_over(batch, [episode.text() for group in groups for episode in group.episodes])
        self._buffer.take(chosen)
        for group, reason in left_over:
            if reason is not None:
                self._drop(group, reason)
        for group in carried:
            group.carries += 1
        assert self._buffer.next_group_id == self._buffer.num_accounted
        self._before, self._started_s = totals, formed_s
        if num_ahead:
            self._ahead = asyncio.create_task(self._generate_ahead(num_ahead, version))
        return batch

    async def pause(self) -> bool:
        """Pause for new weights until ``resume``; return whether generation was running."""
        await self.wait_for_ahead()
        if self._episodes.is_running:
            self._is_paused = True
            if self.config.weight_sync.in_flight == "abort":
                await self._episodes.stop()
            else:
                await self._pool.pause(self.config.weight_sync.in_flight)
        return self._is_paused

    async def resume(self) -> None:
        """Continue after ``pause``, without responses that are too old for the new weights."""
        if self._is_paused:
            if self._pool.states.version is not None:
                self._give_up_stale(self._pool.states.version)
            self._is_paused = False
            if self._episodes.is_running:
                await self._pool.resume()
            self._episodes.advance(self._buffer)

    def state(self) -> SavedRollout:
        """Return what ``restore`` continues from."""
        spent_s = self._spent_s
        if self._is_attached and (self._episodes.is_running or self._ahead is not None):
            spent_s = time.monotonic() - self._started_s
        about = RolloutState(
            prompts=self.prompts.state(),
            generation_s=spent_s,
            counted=_since(self._totals(), self._before),
            sampled_version=self._sampled_version,
            settings=settings_of(self.config),
        )
        return SavedRollout(about, self._buffer.snapshot())

    def restore(self, saved: SavedRollout) -> None:
        """Continue from what ``state`` returned; ``ValueError`` for other data or settings."""
        about = saved.about
        saved.check(self.config)
        self.prompts.restore(about.prompts)
        earlier = deque(saved.buffer.earlier, self.replay.batches)
        self._buffer = self._selection.buffer = replace(saved.buffer, earlier=earlier)
        self._before = _since(self._totals(), about.counted)
        self._spent_s, self._sampled_version = about.generation_s, about.sampled_version
        self._forget_incomplete()

    def _forget_incomplete(self) -> None:
        """Sample or grade again what was saved without its experts or this teacher's scores.

        Groups of earlier batches are dropped instead.
        """
        teacher, earlier = self.grader.teacher, self._buffer.earlier

        def lacks_routes(episode: Episode) -> bool:
            calls = episode.record.all_calls() if self.wants_routes else ()
            return any(call.num_tokens and call.turn.routes is None for call in calls)

        def lacks_scores(episode: Episode) -> bool:
            if teacher is None or episode.sample is None:
                return False
            return not all(map(teacher.has_scored, episode.sample.sequences))

        for group in self._buffer:
            for episode in group.episodes:
                if lacks_routes(episode):
                    episode.start_again()
                elif lacks_scores(episode):
                    episode.texts = None
            if self.grader.sees_groups and not group.is_scored:
                group.start_again((), sees_groups=True)  # other reward functions may have scored it
        for number, groups in enumerate(earlier):
            earlier[number] = tuple(
                group
                for group in groups
                if not any(lacks_routes(e) or lacks_scores(e) for e in group.episodes)
            )

    def _request_of(self, episode: Episode) -> GenerateRequest:
        """The request for an episode's whole response."""
        prompt, config = episode.prompt, self.config
        return GenerateRequest(
            input_ids=prompt.token_ids,
            sampling=SamplingSettings(
                temperature=config.temperature,
                max_new_tokens=config.max_response_tokens,
                seed=sample_seed(self.plan.seed, *episode.key),
            ),
            label=f"sample {episode.index} of group {episode.group_id}, {prompt.prompt_id}",
            order=episode.key,
            routes_from=0 if self.wants_routes else None,
        )

    async def _generate(
        self, step: int, version: int, num_new: int, num_ahead: int
    ) -> tuple[list[PendingGroup], float] | None:
        """Generate and score a batch's new groups; return them and the seconds, or None."""

        def choose() -> list[PendingGroup]:
            num_replayed = self.config.groups_per_step - num_new
            return self._selection.choose(num_new, num_replayed, self._new_tokens)

        await self._end_ahead()
        self._check_lag(step, num_new, version)
        num_wanted = num_new if self.config.fixed_lag is not None else num_new + num_ahead
        while True:
            self._give_up_stale(version)
            self._advance(num_wanted)
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
            # Older groups may have been scored meanwhile; they come first unless they are too old.
            self._give_up_stale(version)
        chosen = choose()
        await self._episodes.settle()  # so that counters do not depend on graders
        while not all(group.is_scored for group in chosen):
            if self.is_interrupted:  # waiting for a teacher can take long
                await self._stop()
                return None
            await self._episodes.wait_for_change()
        return chosen, generation_s

    def _advance(self, num_groups: int) -> None:
        """Draw the prompts that ``num_groups`` groups still need; continue every sample."""
        for _ in range(num_prompts := self._selection.num_to_draw(num_groups)):
            self._buffer.start_group(next(self.prompts), self.config.samples_per_group)
        if num_prompts and self.config.partial_tokens is not None:
            self._buffer.begin_round(self.config.partial_tokens)
        self._episodes.advance(self._buffer)

    def _give_up_stale(self, version: int) -> None:
        """Drop or regenerate what is older than ``rollout.staleness`` allows."""
        nothing_in_flight = self._is_paused or not self._episodes.is_running
        for group, old in self._selection.stale_samples(version, unfinished=nothing_in_flight):
            if self.config.staleness.action == "drop":
                self._drop(group, DropReason.STALE)
                continue
            for episode in old:
                self._episodes.cancel(episode)
            group.start_again(old, sees_groups=self.grader.sees_groups)
            self._num_regenerated += len(old)

    def _drop(self, group: PendingGroup, reason: DropReason) -> None:
        for episode in group.episodes:
            self._episodes.cancel(episode)
        self._buffer.drop(group, reason)

    async def _stop(self) -> None:
        await self._episodes.stop()
        await self._episodes.settle()

    async def _generate_ahead(self, num_groups: int, version: int) -> None:
        """Generate for later steps during training.

        With a fixed lag, the current weights complete all groups; an engine with a stepper takes a
        limited number of decode steps. Otherwise requests stay in flight.
        """
        try:
            self._advance(num_groups)
            if self.config.fixed_lag is None and self._pool.stepper is None:
                return
            if self.config.fixed_lag is not None:
                while not all(group.is_finished for group in self._buffer):
                    if self._pool.states.needs_weights:
                        break  # ``_check_lag`` raises, unless the same weights come again
                    await self._episodes.wait_for_change()
            else:
                remaining = self.config.decode_steps_ahead
                while remaining and (steps := await self._episodes.drive(min(BURST, remaining))):
                    remaining -= steps
                    self._give_up_stale(version)
                    self._advance(num_groups)
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

    def _check_lag(self, step: int, num_new: int, version: int) -> None:
        """Raise if a fixed lag is violated: one weights version must sample a whole response."""
        sampled, self._sampled_version = self._sampled_version, version
        if self.config.fixed_lag is None:
            return
        unfinished = sum(not group.is_finished for group in self._buffer)
        if unfinished and sampled not in (None, version):
            self._sampled_version = sampled
            raise RolloutError(
                "rollout.fixed_lag: all groups must be complete before a weight sync, got "
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
        totals: RolloutStats,
        chosen: Sequence[PendingGroup],
        num_replayed: int,
        left_over: LeftOver,
        generation_s: float,
    ) -> RolloutStats:
        counted = _since(totals, self._before)
        num_filled = sum(map(self._selection.is_useless, chosen))
        staying = [e for group, reason in left_over if reason is None for e in group.episodes]
        num_equal = counted.dropped_groups.get(DropReason.EQUAL_REWARDS, 0)
        return replace(
            counted,
            generation_s=generation_s,
            unfinished_samples=sum(not episode.is_finished for episode in staying),
            environment_errors=counted.environment_errors if self.config.has_environment else None,
            same_answer_share=_same_answer_share(chosen),
            replayed_groups=num_replayed,
            equal_reward_groups=num_equal + num_filled,
            filled_groups=num_filled,
            engine_load=self._pool.states.take_load(),
            loop_lag_s=self.loop_lag.take_max(),
        )

    def _totals(self, left_over: LeftOver = ()) -> RolloutStats:
        """Return the counters so far, including the groups that ``left_over`` drops."""
        given_up = Counter(reason.value for _, reason in left_over if reason is not None)
        dropped = dict(self._buffer.dropped + given_up)
        if not self._is_attached:
            return RolloutStats(dropped_groups=dropped, environment_errors={})
        return RolloutStats(
            generated_tokens=self._episodes.generated_tokens,
            resumed_samples=self._episodes.resumed_samples,
            regenerated_samples=self._num_regenerated,
            lost_requests=self._pool.num_lost_requests
            + (0 if self.grader.teacher is None else self.grader.teacher.num_lost_requests),
            retractions=self._pool.num_retractions,
            reward_timeouts=self.grader.num_timeouts,
            reward_errors=self.grader.num_errors,
            environment_errors=dict(self.interaction.errors),
            environment_counts=dict(self.interaction.counts),
            dropped_groups=dropped,
        )

    @property
    def _new_tokens(self) -> int:
        return self._episodes.generated_tokens - self._before.generated_tokens

    def _leaves_teacher(self) -> bool:
        """Whether a run that is to end would wait for a teacher, which may take its patience."""
        teacher = self.grader.teacher
        return self.is_interrupted and teacher is not None and teacher.num_waiting > 0

    def _describe(self) -> str:
        """Such as ``40/64 groups, 2100 tokens/s``."""
        rate = describe_rate(self._new_tokens, self._started_s)
        ready = len(self._selection.ready())
        num_waiting = 0 if self.grader.teacher is None else self.grader.teacher.num_waiting
        waiting = f", {num_waiting} responses wait for the teacher" if num_waiting else ""
        return f"{ready}/{self.config.groups_per_step} groups{rate}{waiting}"


def _same_answer_share(groups: Sequence[PendingGroup]) -> float:
    answers = Counter(
        group.episodes[0].prompt.answer
        for group in groups
        if any(is_right(episode.finished()) for episode in group.episodes)
    )
    num_further = answers.total() - 1
    return (max(answers.values()) - 1) / num_further if num_further > 0 else 0.0


def _since(now: RolloutStats, before: RolloutStats) -> RolloutStats:
    """Return the counts between two totals."""
    return RolloutStats(*map(_difference, astuple(now), astuple(before)))


def _difference(now: Any, then: Any) -> Any:
    if not isinstance(now, dict):
        return now - then
    counter = Counter(now)
    counter.subtract(then or {})
    return {key: count for key, count in sorted(counter.items()) if count}
