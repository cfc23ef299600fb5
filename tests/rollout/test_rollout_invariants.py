"""Whatever happens to requests, servers, environments and the trainer, every prompt drawn is
trained, dropped for a counted reason, or in the buffer; never twice; group n has the n-th draw of
the mixture, as if nothing had been interrupted; tokens, log-probs and versions stay aligned.

Random sequences of events against a pool of which the test decides what each request receives.
"""

import asyncio
import zlib
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bapo_megatron.config.rollout import EpisodesConfig, ReplayConfig, RolloutConfig
from bapo_megatron.data.staleness import token_versions
from bapo_megatron.data.stream import PromptMixture
from bapo_megatron.environment.base import EnvironmentFailedError, Step, Task, Turn
from bapo_megatron.rollout.buffer import Episode, PendingGroup
from bapo_megatron.rollout.episodes import Interaction
from bapo_megatron.types import FinishReason, Prompt, RolloutBatch, Sample, SampleText
from tests.data.prompt_sets import make_prompt_set
from tests.fakes.fake_pool import WRITTEN, FakePool, logprobs_of
from tests.fakes.scripted_environment import ScriptedEnvironment
from tests.rollout.batching_setup import Renderer, Rewards, make_batches
from tests.rollout.calls import so_far
from tests.rollout.saved_files import file_of, read_file, without_clock
from tests.rollout.test_repeats import NOT_PARTIAL, PARTIAL, ROUNDS

pytestmark = pytest.mark.exhaustive

GROUPS, SAMPLES, MAX_TOKENS, UPDATES = 4, 2, 12, 2
SETS = [
    make_prompt_set(
        name, [Prompt(f"{name}:{number}", (1, 2), "", "") for number in range(size)], weight
    )
    for name, size, weight in (("p", 7, 2.0), ("q", 3, 1.0))
]
DRAWS = [prompt.prompt_id for prompt in islice(PromptMixture(SETS, seed=0, shuffle=True), 4000)]


def begin(task: Task) -> Any:
    if task.seed % 16 == 0:
        raise EnvironmentFailedError("it cannot begin", "error")
    return {"seed": task.seed}


def answer(state: dict[str, Any], turn: Turn) -> Step:
    """The end of the episode, up to four tokens, which tell their positions, or a failure."""
    drawn = zlib.crc32(repr((state, turn.number, turn.token_ids)).encode()) % 8
    if drawn == 0:
        raise EnvironmentFailedError("it is broken", "error")
    if drawn <= 3:
        return Step(state, is_done=True)
    first = WRITTEN + MAX_TOKENS - turn.remaining_tokens
    state["seed"] += 1
    return Step(state, token_ids=range(first, first + drawn - 3))


class RewardsByGroup(Rewards):
    """Every third group has equal rewards; scores arrive when the test says so."""

    def __init__(self) -> None:
        super().__init__(equal=range(0, len(DRAWS), 3))
        self.waiting: list[asyncio.Future[None]] = []

    async def score(self, episode: Episode, group: PendingGroup) -> None:
        ready = asyncio.get_running_loop().create_future()
        self.waiting.append(ready)
        try:
            await ready
        finally:
            self.waiting.remove(ready)
        await super().score(episode, group)


class RolloutMachine(RuleBasedStateMachine):
    """A trainer that calls, servers that answer, and everything that comes between."""

    @initialize(
        rollout=st.one_of(PARTIAL, NOT_PARTIAL, ROUNDS),
        in_flight=st.sampled_from(["abort", "retract"]),
        case=st.fixed_dictionaries(
            {
                "scores_in_drain": st.booleans(),
                "disk_is_full": st.booleans(),
                "has_environment": st.booleans(),
                "replay": st.sampled_from(
                    [{}, {"batches": 2, "share": 0.5}, {"batches": 1, "max_age": 1}]
                ),
            }
        ),
    )
    def begin(self, rollout: dict[str, Any], in_flight: str, case: dict[str, Any]) -> None:
        if rollout["tokens_per_step"] is not None:
            rollout["tokens_per_step"] = 20  # its responses are shorter
        self.config = RolloutConfig.model_validate(
            {
                **rollout,
                "groups_per_step": GROUPS,
                "samples_per_group": SAMPLES,
                "max_response_tokens": MAX_TOKENS,
                "weight_sync": {"in_flight": in_flight},
            }
        )
        vars(self).update(case)
        self.loop = asyncio.new_event_loop()
        self.trained: list[int] = []
        self.step = 1
        self.collecting: asyncio.Task[RolloutBatch | None] | None = None
        self.started = True
        self.start_collector(version=0)
        self.save()

    def start_collector(self, version: int) -> None:
        self.pool = FakePool(version)
        self.rewards = RewardsByGroup()
        if self.scores_in_drain:
            self.pool.on_drain = self.score_all
        self.environment = ScriptedEnvironment(answer, begin)
        self.environment.waits = True
        limits = EpisodesConfig(max_turns=3, on_error="zero")
        interaction = Interaction(self.environment, Renderer(), limits)
        self.batches = make_batches(
            self.rewards,
            self.config,
            interaction=interaction if self.has_environment else None,
            prompts=PromptMixture(SETS, seed=0, shuffle=True),
            replay=self.replay,
            total_steps=1000,
            updates=UPDATES,
        )
        self.batches.attach(self.pool)

    async def collect(self) -> RolloutBatch | None:
        """Collect a batch; where the disk is full, it is handed over at the second attempt."""
        before: list[bytes] = []

        async def hand_over(batch: RolloutBatch, texts: Sequence[SampleText]) -> None:
            assert [(text.group_id, text.index) for text in texts] == [
                (sample.group_id, sample.index) for sample in batch.samples
            ]
            if self.disk_is_full and not before:
                before.append(without_clock(self.batches.state()))
                raise OSError("the disk is full")

        try:
            return await self.batches.collect(self.step, hand_over)
        except OSError:
            assert [without_clock(self.batches.state())] == before
            return await self.batches.collect(self.step, hand_over)

    def score_all(self) -> None:
        for ready in self.rewards.waiting:
            if not ready.done():
                ready.set_result(None)

    def run(self) -> None:
        """Let every task go as far as it can."""

        async def settle() -> None:
            for _ in range(24):
                await asyncio.sleep(0)
                if not self.loop._ready:
                    break

        self.loop.run_until_complete(settle())

    def save(self) -> None:
        """Keep what a killed trainer comes back to."""
        self.checkpoint = (self.batches.state(), list(self.trained), self.pool.version, self.step)

    @precondition(lambda self: self.pool.requests)
    @rule(choice=st.integers(0, 10**6), count=st.integers(0, 5), ends=st.booleans())
    def a_request_receives_tokens(self, choice: int, count: int, ends: bool) -> None:
        request = self.pool.requests[choice % len(self.pool.requests)]
        reason = FinishReason.STOP if ends else FinishReason.ABORT
        self.pool.give(request, max(count, int(ends)), reason)
        self.run()

    @precondition(lambda self: self.pool.requests)
    @rule(count=st.integers(1, 5))
    def every_response_ends(self, count: int) -> None:
        for request in list(self.pool.requests):
            self.pool.give(request, count, FinishReason.STOP)
        self.run()

    @precondition(lambda self: self.environment.waiting)
    @rule(choice=st.integers(0, 10**6))
    def an_environment_answers(self, choice: int) -> None:
        waiting = self.environment.waiting
        waiting[choice % len(waiting)].set_result(None)
        self.run()

    @precondition(lambda self: self.rewards.waiting)
    @rule(count=st.integers(1, 8))
    def answers_are_scored(self, count: int) -> None:
        for ready in self.rewards.waiting[:count]:
            ready.set_result(None)
        self.run()

    @precondition(lambda self: self.collecting is None)
    @rule()
    def the_trainer_asks_for_a_batch(self) -> None:
        self.collecting = self.loop.create_task(self.collect())
        self.run()

    @precondition(lambda self: self.collecting is not None and self.collecting.done())
    @rule(updates=st.integers(0, 2), saves=st.booleans())
    def the_trainer_trains_and_pushes_weights(self, updates: int, saves: bool) -> None:
        batch = self.collecting.result()
        self.collecting = None
        self.take(batch)
        self.sync(self.pool.version + updates)
        if saves:
            self.save()

    @precondition(lambda self: self.collecting is not None and not self.collecting.done())
    @rule()
    def every_server_is_lost_and_weights_are_pushed_again(self) -> None:
        self.pool.needs_weights = True
        self.batches._episodes.news.set()
        self.run()
        self.pool.needs_weights = False
        if not self.collecting.done():
            return  # its groups are finished, only their scores are missing
        if self.config.tokens_per_step is not None and self.collecting.result() is not None:
            return  # tokens that came meanwhile had completed the batch
        assert self.collecting.result() is None
        self.sync(self.pool.version)
        self.collecting = self.loop.create_task(self.collect())
        self.run()

    @rule()
    def the_trainer_is_killed_and_resumes(self) -> None:
        if self.collecting is not None:
            self.collecting.cancel()
        self.loop.run_until_complete(self.batches.close())
        self.run()
        state, trained, version, self.step = self.checkpoint
        self.trained, self.collecting = list(trained), None
        self.start_collector(version)
        # Written as late as this: nothing that came since may be in it.
        self.batches.restore(read_file(file_of(state)))

    def sync(self, version: int) -> None:
        async def push() -> None:
            await self.batches.pause()
            self.pool.version = version
            await self.batches.resume()

        self.loop.run_until_complete(push())
        self.run()

    def take(self, batch: RolloutBatch) -> None:
        """Hold the rules of a batch."""
        assert batch.step == self.step
        assert batch.version == self.pool.version
        self.step += 1
        replayed = [group for group in batch.groups if group.group_id in self.trained]
        new = [group for group in batch.groups if group.group_id not in self.trained]
        assert new
        assert len(replayed) == batch.stats.replayed_groups
        assert len(replayed) <= ReplayConfig(**self.replay).share * GROUPS
        assert len(batch.groups) <= GROUPS
        assert len(batch.groups) % UPDATES == 0
        if self.config.tokens_per_step is None:
            assert len(batch.groups) == GROUPS
        assert [group.group_id for group in new] == sorted(group.group_id for group in new)
        for group in batch.groups:
            assert [sample.index for sample in group.samples] == list(range(SAMPLES))
            assert group.samples[0].prompt.prompt_id == DRAWS[group.group_id]
            for sample in group.samples:
                assert sample.finish_reason is not FinishReason.ABORT
                check_tokens(sample)
        for group in new:
            self.check_age(group.samples, batch.version)
        self.trained += [group.group_id for group in new]

    def check_age(self, samples: tuple[Sample, ...], version: int) -> None:
        limit = self.config.staleness
        if limit.max_age is None or limit.action == "mask":
            return
        for sample in samples:
            ages = version - token_versions(sample.versions)
            if not len(ages):
                continue  # its environment could not begin
            measured = ages.mean() if limit.measure == "mean" else ages.max()
            assert measured <= limit.max_age

    @invariant()
    def every_prompt_is_accounted_for_exactly_once(self) -> None:
        if self.collecting is not None and self.collecting.done():
            return  # what the batch holds is counted as trained when the trainer takes it
        buffer = self.batches.scheduler.buffer
        assert len(self.trained) == len(set(self.trained)) == buffer.num_trained
        assert not set(self.trained) & set(buffer.groups)
        accounted = len(self.trained) + sum(buffer.dropped.values()) + len(buffer)
        assert buffer.next_group_id == accounted
        for group in buffer:
            for episode in group.episodes:
                check_tokens(so_far(episode))

    @invariant()
    def a_sample_is_sampled_by_one_request_at_a_time(self) -> None:
        episodes = self.batches._episodes
        for run in episodes._runs.values():
            assert len(run.sampling) + len(run.held) <= 1
            if run.sampling:
                assert not run.episode.awaits_answer
        labels = [request.label for request in self.pool.requests]
        assert len(labels) == len(set(labels))

    @invariant()
    def no_request_asks_for_more_than_its_response_may_get(self) -> None:
        for request in self.pool.requests:
            assert request.max_tokens <= MAX_TOKENS
            if self.config.partial_tokens is not None:
                assert request.asked_tokens <= self.config.partial_tokens

    def teardown(self) -> None:
        if hasattr(self, "started"):
            self.finish_a_batch()
            self.loop.run_until_complete(self.batches.close())
            self.run()
            self.loop.close()

    def finish_a_batch(self) -> None:
        """No work was forgotten: once everything ends and is scored, there is a batch."""
        if self.collecting is None:
            self.collecting = self.loop.create_task(self.collect())
        for _ in range(120):
            self.run()
            if self.collecting.done():
                break
            self.environment.let_answer()
            for request in list(self.pool.requests):
                self.pool.give(request, 1, FinishReason.STOP)
            for ready in self.rewards.waiting:
                ready.set_result(None)
        assert self.collecting.done()
        self.take(self.collecting.result())


def check_tokens(sample: Sample) -> None:
    """Tokens, log-probs and versions belong to each other; versions never decrease."""
    length = len(sample.response_token_ids)
    assert length <= MAX_TOKENS
    position_R = np.arange(length)
    expected_R = np.where(sample.loss_mask, position_R, position_R + WRITTEN)
    assert sample.response_token_ids.tolist() == expected_R.tolist()
    edges = [edge for start, n in sample.written for edge in (start, start + n)]
    # A turn, something written, a turn …
    assert all(one < other for one, other in pairwise([0, *edges]))
    assert sample.num_turns <= 3
    if sample.finish_reason is not FinishReason.ABORT:
        assert not edges or edges[-1] < length
    versions = token_versions(sample.versions)
    assert len(versions) == sample.num_sampled
    assert all(span.num_tokens > 0 for span in sample.versions)
    assert all(one.version < other.version for one, other in pairwise(sample.versions))
    expected = logprobs_of(sample.sampled_token_ids, versions)
    assert sample.behaviour_logprobs.tolist() == expected.tolist()


TestRolloutInvariants = pytest.mark.slow(RolloutMachine.TestCase)
TestRolloutInvariants.settings = settings(
    max_examples=300,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
