"""The rules of batches, one by one, against a pool of which the test decides what comes when."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bapo_megatron.config.rollout import ReplayConfig, RolloutConfig
from bapo_megatron.data.dump import DumpError
from bapo_megatron.data.stream import PromptStream
from bapo_megatron.rollout.base import RolloutError
from bapo_megatron.rollout.batching import BatchCollector
from bapo_megatron.rollout.selection import BatchPlan, merge
from bapo_megatron.types import FinishReason, Group, Prompt
from tests.fakes.fake_pool import FakePool, Request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from bapo_megatron.rollout.buffer import PendingSample
    from bapo_megatron.types import RolloutBatch

PROMPTS = [Prompt(f"p:{number}", (1, 2), "", "") for number in range(50)]
TOTAL_STEPS = 10


class Rewards:
    """Equal rewards in the groups of ``equal``, else one right response per group."""

    num_timeouts = 0

    def __init__(self, equal: Sequence[int]) -> None:
        self._equal = equal
        self.held: dict[int, asyncio.Event] = {}
        """Scores of these groups wait."""

    async def score(self, pending: PendingSample) -> None:
        sample = pending.sample
        if sample.group_id in self.held:
            await self.held[sample.group_id].wait()
        sample.reward = 0.0 if sample.group_id in self._equal else float(sample.index == 0)
        pending.is_scored = True


class Setup:
    """Two groups of two responses per step, unless the test wants something else."""

    def __init__(
        self, equal: Sequence[int] = (), replay: dict[str, Any] | None = None, **rollout: Any
    ) -> None:
        config = {
            "groups_per_step": 2,
            "samples_per_group": 2,
            "max_response_tokens": 20,
            **rollout,
        }
        self.pool = FakePool()
        self.failure: Exception | None = None
        """Of the next delivery."""
        self.rewards = Rewards(equal)
        self.batches = BatchCollector(
            self.rewards,
            PromptStream(PROMPTS, seed=0, shuffle=False),
            RolloutConfig.model_validate(config),
            ReplayConfig.model_validate(replay or {}),
            BatchPlan(seed=0, total_steps=TOTAL_STEPS, updates_per_batch=2),
            lambda line: None,
        )
        self.batches.attach(self.pool)

    def collect(self, step: int) -> asyncio.Task[RolloutBatch | None]:
        return asyncio.create_task(self.batches.collect(step, self.hand_over))

    async def hand_over(self, batch: RolloutBatch) -> None:
        if self.failure is not None:
            failure, self.failure = self.failure, None
            self.state_at_failure = self.batches.state()
            raise failure

    def open_groups(self) -> list[int]:
        """Groups with a request in flight."""
        return sorted({_group_of(request) for request in self.pool.requests})

    async def give(self, group_ids: Sequence[int], count: int, *, ends: bool = False) -> None:
        """Let every request of these groups receive tokens."""
        reason = FinishReason.STOP if ends else FinishReason.ABORT
        for request in [r for r in self.pool.requests if _group_of(r) in group_ids]:
            self.pool.give(request, count, reason)
        await settle()

    async def sync(self, version: int) -> None:
        await self.batches.pause()
        self.pool.version = version
        await self.batches.resume()
        await settle()


def _group_of(request: Request) -> int:
    return int(request.label.split("group ")[1].split(",")[0])


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(60):
            await scene()

    asyncio.run(run())


def ids(batch: RolloutBatch | None) -> list[int]:
    assert batch is not None
    return [group.group_id for group in batch.groups]


def test_a_synchronous_step_leaves_nothing_in_flight_and_draws_nothing_for_later() -> None:
    async def scene() -> None:
        setup = Setup(oversample_groups=1)
        batch = setup.collect(0)
        await settle()
        assert setup.open_groups() == [0, 1, 2]
        await setup.give([0], 3)
        await setup.give([1, 2], 4, ends=True)
        assert ids(await batch) == [1, 2]
        assert setup.pool.requests == []
        assert setup.batches.state()["buffer"]["next_group_id"] == 3

    play(scene)


def test_an_asynchronous_step_goes_on_with_the_next_ones_while_the_trainer_works() -> None:
    async def scene() -> None:
        setup = Setup(async_steps=2)
        batch = setup.collect(0)
        await settle()
        assert setup.open_groups() == [0, 1, 2, 3, 4, 5]
        await setup.give([0, 1, 3], 4, ends=True)
        assert ids(await batch) == [0, 1]
        await settle()
        # Two steps ahead: groups 2 to 5, of which 3 is finished.
        assert setup.open_groups() == [2, 4, 5]
        await setup.give([2], 1, ends=True)
        batch = setup.collect(1)
        await settle()
        assert setup.open_groups() == [4, 5, 6, 7]
        assert ids(await batch) == [2, 3]

    play(scene)


def test_nothing_is_generated_for_steps_after_the_last() -> None:
    async def scene() -> None:
        setup = Setup(async_steps=2)
        batch = setup.collect(TOTAL_STEPS - 2)
        await settle()
        assert setup.open_groups() == [0, 1, 2, 3]
        await setup.give([0, 1], 4, ends=True)
        await batch
        batch = setup.collect(TOTAL_STEPS - 1)
        await settle()
        assert setup.open_groups() == [2, 3]
        await setup.give([2, 3], 4, ends=True)
        assert ids(await batch) == [2, 3]
        assert setup.pool.requests == []

    play(scene)


@pytest.mark.parametrize(
    ("in_flight", "calls"),
    [("abort", ["drain", "reopen"]), ("in_place", ["pause in_place", "resume"])],
)
def test_a_weight_sync_interrupts_what_is_in_flight_as_configured(
    in_flight: str, calls: list[str]
) -> None:
    async def scene() -> None:
        setup = Setup(async_steps=1, weight_sync={"in_flight": in_flight})
        batch = setup.collect(0)
        await settle()
        await setup.give([0, 1], 4, ends=True)
        await setup.give([2, 3], 3)
        await batch
        setup.pool.calls.clear()
        await setup.sync(1)
        assert setup.pool.calls == calls
        assert setup.open_groups() == [2, 3]
        await setup.give([2, 3], 2, ends=True)
        second = await setup.collect(1)
        assert second is not None
        for sample in second.samples:
            assert sample.versions.tolist() == [0, 0, 0, 1, 1]
        assert second.stats.resumed_samples == (4 if in_flight == "abort" else 0)

    play(scene)


def test_a_token_budget_ends_the_step_with_what_is_complete() -> None:
    async def scene() -> None:
        setup = Setup(groups_per_step=6, tokens_per_step=20)
        batch = setup.collect(0)
        await settle()
        await setup.give([0, 1, 2], 3, ends=True)  # 18 tokens
        assert not batch.done()
        await setup.give([3], 1)  # 20 tokens
        await asyncio.wait([batch])
        # Three groups are complete; two updates need an even number.
        assert ids(batch.result()) == [0, 1]
        batch = setup.collect(1)
        await settle()
        assert setup.open_groups() == [3, 4, 5, 6, 7]
        await setup.give([4], 10)
        assert not batch.done()  # one group per update at least
        await setup.give([5], 1, ends=True)
        assert ids(await batch) == [2, 5]

    play(scene)


def test_a_prompt_that_was_carried_too_often_is_dropped_and_counted() -> None:
    async def scene() -> None:
        setup = Setup(oversample_groups=1, max_carries=1)
        for step, finished in enumerate(([1, 2], [3, 4])):
            batch = setup.collect(step)
            await settle()
            await setup.give([0], 2)
            await setup.give(finished, 4, ends=True)
            assert ids(await batch) == finished
            assert batch.result().stats.dropped_groups == ({"carried": 1} if step else {})
        assert setup.batches.state()["buffer"]["groups"] == []

    play(scene)


def test_groups_with_equal_rewards_are_replaced_until_the_batch_is_full() -> None:
    async def scene() -> None:
        setup = Setup(equal=[0, 2], dynamic_sampling={"enabled": True})
        batch = setup.collect(0)
        await settle()
        await setup.give([0, 1], 4, ends=True)
        await settle()
        assert setup.open_groups() == [2]
        await setup.give([2], 4, ends=True)
        assert setup.open_groups() == [3]
        await setup.give([3], 4, ends=True)
        assert ids(await batch) == [1, 3]
        stats = batch.result().stats
        assert stats.equal_reward_groups == 2
        assert stats.filled_groups == 0
        assert stats.dropped_groups == {"equal_rewards": 2}

    play(scene)


def test_at_its_limit_dynamic_sampling_fills_the_batch_with_the_latest_of_the_others() -> None:
    async def scene() -> None:
        setup = Setup(equal=range(50), dynamic_sampling={"enabled": True, "max_groups_ratio": 2})
        batch = setup.collect(0)
        for _ in range(2):
            await settle()
            await setup.give(setup.open_groups(), 4, ends=True)
        assert ids(await batch) == [2, 3]
        stats = batch.result().stats
        assert stats.equal_reward_groups == 4
        assert stats.filled_groups == 2
        assert stats.dropped_groups == {"equal_rewards": 2}

    play(scene)


@pytest.mark.parametrize("in_flight", ["abort", "retract"])
@pytest.mark.parametrize("action", ["drop", "regenerate"])
def test_responses_that_became_too_old_are_given_up(action: str, in_flight: str) -> None:
    async def scene() -> None:
        setup = Setup(
            async_steps=1,
            oversample_groups=1,
            staleness={"max_age": 1, "action": action},
            weight_sync={"in_flight": in_flight},
        )
        batch = setup.collect(0)
        await settle()
        await setup.give([0, 1], 4, ends=True)
        await setup.give([2], 3)  # will be two versions old
        await setup.give([3], 3, ends=True)
        await batch
        await setup.sync(2)
        if action == "drop":  # not even continued
            assert 2 not in setup.open_groups()
        else:
            assert [r.received for r in setup.pool.requests if _group_of(r) == 2] == [0, 0]
        batch = setup.collect(1)
        await settle()
        if action == "drop":
            assert 2 not in setup.open_groups()
            assert 3 not in setup.open_groups()
            await setup.give([4, 5], 4, ends=True)
            assert ids(await batch) == [4, 5]
            assert batch.result().stats.dropped_groups == {"stale": 2}
        else:
            await setup.give([2, 3], 4, ends=True)
            assert ids(await batch) == [2, 3]
            assert batch.result().stats.regenerated_samples == 4
        for sample in batch.result().samples:
            assert sample.versions.tolist() == [2, 2, 2, 2]

    play(scene)


@pytest.mark.parametrize("action", ["drop", "regenerate"])
def test_what_is_scored_while_the_rest_is_aborted_is_judged_by_its_age_too(action: str) -> None:
    async def scene() -> None:
        setup = Setup(
            oversample_groups=1, staleness={"max_age": 1, "measure": "mean", "action": action}
        )
        held = setup.rewards.held[0] = asyncio.Event()
        batch = setup.collect(0)
        await settle()
        await setup.give([0, 1, 2], 4, ends=True)
        assert ids(await batch) == [1, 2]
        await setup.sync(2)
        batch = setup.collect(1)
        await settle()
        setup.pool.on_drain = held.set
        await setup.give([3, 4], 4, ends=True)
        assert ids(await batch) == [3, 4]
        stats = batch.result().stats
        assert stats.dropped_groups == ({"stale": 1} if action == "drop" else {})
        assert stats.regenerated_samples == (0 if action == "drop" else 2)
        await setup.batches.close()

    play(scene)


def test_requests_that_an_evaluation_lost_are_not_those_of_the_batch() -> None:
    async def scene() -> None:
        setup = Setup()
        setup.pool.num_lost_requests = 5
        setup.batches.leave_out_lost(3)
        batch = setup.collect(0)
        await settle()
        await setup.give([0, 1], 4, ends=True)
        assert (await batch).stats.lost_requests == 2

    play(scene)


def test_replay_adds_groups_of_earlier_batches_spread_over_the_updates() -> None:
    async def scene() -> None:
        setup = Setup(groups_per_step=4, replay={"batches": 2, "share": 0.5})
        first = setup.collect(0)
        await settle()
        await setup.give([0, 1, 2, 3], 4, ends=True)
        assert ids(await first) == [0, 1, 2, 3]
        await setup.sync(3)
        second = setup.collect(1)
        await settle()
        assert setup.open_groups() == [4, 5]
        await setup.give([4, 5], 4, ends=True)
        groups = ids(await second)
        assert [group_id for group_id in groups if group_id >= 4] == [4, 5]
        assert {groups[0] >= 4, groups[1] >= 4} == {True, False}  # each update has both
        assert second.result().stats.replayed_groups == 2
        old = [s for s in second.result().samples if s.group_id < 4]
        assert all((sample.versions == 0).all() for sample in old)

    play(scene)


def test_groups_kept_for_replay_must_have_the_size_of_new_ones() -> None:
    async def scene() -> None:
        setup = Setup(replay={"batches": 1})
        batch = setup.collect(0)
        await settle()
        await setup.give([0, 1], 4, ends=True)
        await batch
        state = setup.batches.state()
        assert state["buffer"]["groups"] == []
        other = Setup(replay={"batches": 1}, samples_per_group=3)
        with pytest.raises(ValueError, match=r"samples_per_group: was 2 when group 0 .* is 3 now"):
            other.batches.restore(state)

    play(scene)


def test_replay_leaves_out_groups_beyond_its_age_limit() -> None:
    async def scene() -> None:
        setup = Setup(groups_per_step=4, replay={"batches": 2, "max_age": 2})
        first = setup.collect(0)
        await settle()
        await setup.give([0, 1, 2, 3], 4, ends=True)
        await first
        await setup.sync(3)
        second = setup.collect(1)
        await settle()
        assert setup.open_groups() == [4, 5, 6, 7]
        await setup.give([4, 5, 6, 7], 4, ends=True)
        assert (await second).stats.replayed_groups == 0

    play(scene)


def test_without_any_server_that_holds_the_weights_the_trainer_is_asked_for_them() -> None:
    async def scene() -> None:
        setup = Setup()
        batch = setup.collect(0)
        await settle()
        await setup.give([0], 3)
        setup.pool.needs_weights = True
        await setup.give([1], 4, ends=True)
        assert await batch is None
        setup.pool.needs_weights = False
        await setup.sync(0)
        batch = setup.collect(0)
        await settle()
        assert setup.open_groups() == [0]
        await setup.give([0], 1, ends=True)
        assert ids(await batch) == [0, 1]

    play(scene)


@pytest.mark.parametrize("failure", [RolloutError("the disk is full"), DumpError("not intact")])
def test_a_batch_that_could_not_be_handed_over_changes_nothing_and_comes_again(
    failure: Exception,
) -> None:
    async def scene() -> None:
        setup = Setup(
            equal=[2],
            replay={"batches": 1, "share": 0.5},
            oversample_groups=4,
            max_carries=1,
            dynamic_sampling={"enabled": True},
        )
        first = setup.collect(0)
        await settle()
        await setup.give([3], 2)  # carried for the first time
        await setup.give([0, 1, 2], 3, ends=True)
        assert ids(await first) == [0, 1]
        second = setup.collect(1)
        await settle()
        setup.failure = failure
        await setup.give([4], 3, ends=True)
        with pytest.raises(type(failure)):
            await second
        state = setup.batches.state()
        assert state == setup.state_at_failure
        assert [[group["group_id"] for group in batch] for batch in state["buffer"]["earlier"]] == [
            [0, 1]
        ]
        again = await setup.collect(1)
        assert sorted(ids(again)) in ([0, 4], [1, 4])
        assert again is not None
        assert again.stats.dropped_groups == {"carried": 1}
        assert again.stats.generated_tokens == 6
        await setup.batches.close()

    play(scene)


@pytest.mark.parametrize("num_ticks", range(4))
def test_a_cancellation_that_comes_with_news_is_not_lost(num_ticks: int) -> None:
    async def scene() -> None:
        setup = Setup()
        batch = setup.collect(0)
        await settle()
        setup.batches._generation.news.set()
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        batch.cancel()
        await asyncio.wait([batch], timeout=1.0)
        assert batch.cancelled()
        await setup.batches.close()

    play(scene)


def test_an_error_of_a_request_ends_the_step_and_loses_no_token() -> None:
    async def scene() -> None:
        setup = Setup()
        batch = setup.collect(0)
        await settle()
        await setup.give([0], 3)
        setup.pool.requests[0].ended.set_exception(RolloutError("no server is left"))
        with pytest.raises(RolloutError, match="no server is left"):
            await batch
        [group, _] = setup.batches.state()["buffer"]["groups"]
        assert [len(sample["response_token_ids"]) > 0 for sample in group["samples"]] == [True] * 2
        await setup.batches.close()

    play(scene)


@pytest.mark.parametrize(("num_new", "num_old"), [(4, 0), (2, 2), (3, 1), (1, 5)])
def test_merged_groups_keep_their_order_and_every_part_has_its_share(
    num_new: int, num_old: int
) -> None:
    new = [Group(100 + number, ()) for number in range(num_new)]
    old = [Group(number, ()) for number in range(num_old)]
    merged = [group.group_id for group in merge(new, old)]
    assert sorted(merged) == [*range(num_old), *range(100, 100 + num_new)]
    assert [group_id for group_id in merged if group_id >= 100] == [g.group_id for g in new]
    half = np.array(merged[: len(merged) // 2]) >= 100
    assert abs(half.sum() - num_new / 2) <= 1
