"""What is driven, and how far; that nothing hangs where a task fails or the engine is lost."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from bapo_megatron.config.rollout import ReplayConfig, RolloutConfig
from bapo_megatron.reward.base import RewardError
from bapo_megatron.rollout.batching import BatchCollector
from bapo_megatron.rollout.selection import BatchPlan
from tests.data.prompt_sets import make_stream
from tests.fakes.fake_pool import deliver
from tests.fakes.stepped_pool import SteppedPool
from tests.rollout.batching_setup import (
    PROMPTS,
    TOTAL_STEPS,
    Rewards,
    group_of,
    ids,
    play,
    single_turn,
)

if TYPE_CHECKING:
    from bapo_megatron.rollout.buffer import PendingGroup, PendingSample


class FailingRewards(Rewards):
    """Fails for one group."""

    failing: int | None = None

    def __init__(self) -> None:
        super().__init__(equal=())
        self.asked: set[int] = set()
        """Groups of which a score was asked."""

    async def score(self, pending: PendingSample, group: PendingGroup) -> None:
        self.asked.add(pending.sample.group_id)
        if pending.sample.group_id == self.failing:
            raise RewardError("the grader is gone")
        await super().score(pending, group)


class Setup:
    """Two groups of two responses per step, of at most 100 tokens."""

    def __init__(self, **rollout: Any) -> None:
        config = {"groups_per_step": 2, "samples_per_group": 2, "max_response_tokens": 100}
        self.pool = SteppedPool()
        self.rewards = FailingRewards()
        self.lines: list[str] = []
        self.batches = BatchCollector(
            single_turn(),
            self.rewards,
            make_stream(PROMPTS),
            RolloutConfig.model_validate({**config, **rollout}),
            ReplayConfig(),
            BatchPlan(seed=0, total_steps=TOTAL_STEPS, updates_per_batch=1),
            self.lines.append,
        )
        self.batches.attach(self.pool)


def test_every_decision_is_sixteen_decode_steps_after_the_one_before() -> None:
    async def scene() -> None:
        setup = Setup()
        assert ids(await setup.batches.collect(1, deliver)) == [0, 1]
        assert len(setup.pool.bursts) > 2
        assert set(setup.pool.bursts[:-1]) == {16}
        assert setup.pool.requests == []

    play(scene)


@pytest.mark.parametrize(("local", "num_steps"), [({}, 50), ({"decode_steps_ahead": 19}, 19)])
def test_a_fixed_number_of_decode_steps_is_made_beside_the_training(
    local: dict[str, int], num_steps: int
) -> None:
    async def scene() -> None:
        # Every response is as long as it may be, and some remain.
        setup = Setup(async_steps=2, oversample_groups=6, local=local)
        setup.pool.stop_interval = 1 << 40
        await setup.batches.collect(1, deliver)
        before = len(setup.pool.bursts)
        await setup.batches.pause()
        ahead = setup.pool.bursts[before:]
        assert sum(ahead) == num_steps
        assert ahead[:-1] == [16] * (len(ahead) - 1)
        assert setup.pool.requests == []

    play(scene)


def test_nothing_is_made_ahead_of_the_last_step() -> None:
    async def scene() -> None:
        setup = Setup(async_steps=1)
        await setup.batches.collect(TOTAL_STEPS, deliver)
        num_bursts = len(setup.pool.bursts)
        await setup.batches.pause()
        await asyncio.sleep(0.01)
        assert len(setup.pool.bursts) == num_bursts

    play(scene)


def test_what_fails_beside_the_training_fails_the_next_batch() -> None:
    async def scene() -> None:
        setup = Setup(async_steps=1)
        await setup.batches.collect(1, deliver)
        setup.rewards.failing = group_of(setup.pool.requests[-1])
        setup.pool.stop_interval = 1
        assert await setup.batches.pause() is False
        setup.pool.version = 1
        await setup.batches.resume()
        assert setup.pool.requests == [], "an evaluation finds the engine for itself"
        setup.batches.state()
        num_bursts = len(setup.pool.bursts)
        with pytest.raises(RewardError, match="the grader is gone"):
            await setup.batches.collect(2, deliver)
        assert len(setup.pool.bursts) == num_bursts, "it failed before"
        await setup.batches.close()

    play(scene)


def test_a_grader_that_fails_ends_the_batch() -> None:
    async def scene() -> None:
        setup = Setup()
        setup.rewards.failing = 1
        with pytest.raises(RewardError, match="the grader is gone"):
            await setup.batches.collect(1, deliver)
        await setup.batches.close()

    play(scene)


def test_while_a_grader_is_slow_nothing_is_sampled() -> None:
    async def scene() -> None:
        setup = Setup()
        setup.rewards.held[0] = asyncio.Event()
        collecting = asyncio.create_task(setup.batches.collect(1, deliver))
        while setup.pool.requests or setup.rewards.asked != {0, 1}:
            await asyncio.sleep(0)
        num_bursts = len(setup.pool.bursts)
        await asyncio.sleep(0.6)  # longer than between two lines of progress
        assert len(setup.pool.bursts) == num_bursts
        assert not collecting.done()
        setup.rewards.held[0].set()
        assert ids(await collecting) == [0, 1]
        assert len(setup.lines) > 1

    play(scene)


def test_progress_is_told_during_a_long_burst() -> None:
    async def scene() -> None:
        setup = Setup(max_response_tokens=8)
        setup.pool.burst_s = 1.2
        await setup.batches.collect(1, deliver)
        assert len(setup.pool.bursts) == 1
        assert len(setup.lines) == 3

    play(scene)


@pytest.mark.parametrize("async_steps", [0, 1])
def test_an_engine_that_loses_its_weights_gets_them_again_and_goes_on(async_steps: int) -> None:
    async def scene() -> None:
        setup = Setup(async_steps=async_steps)
        setup.pool.stop_interval = 50
        collecting = asyncio.create_task(setup.batches.collect(1, deliver))
        while not setup.pool.bursts:
            await asyncio.sleep(0)
        setup.pool.lose()
        assert await collecting is None
        await setup.batches.pause()
        setup.pool.needs_weights = False
        await setup.batches.resume()
        assert await setup.batches.collect(1, deliver) is not None
        setup.pool.lose()  # also beside the training
        await setup.batches.pause()
        setup.pool.needs_weights = False
        await setup.batches.resume()
        assert await setup.batches.collect(2, deliver) is not None
        await setup.batches.close()

    play(scene)


def test_groups_that_teach_nothing_are_replaced_beside_the_training_too() -> None:
    async def scene() -> None:
        setup = Setup(
            async_steps=1, dynamic_sampling={"enabled": True}, local={"decode_steps_ahead": 16}
        )
        setup.rewards.equal = range(2, 100)
        assert ids(await setup.batches.collect(1, deliver)) == [0, 1]
        drawn = setup.batches.state().buffer.next_group_id
        setup.pool.stop_interval = 1  # every response ends at once
        await setup.batches.pause()
        assert setup.pool.bursts[-16:] == [1] * 16
        assert setup.batches.state().buffer.next_group_id >= drawn + 16

    play(scene)


def test_closing_ends_what_is_made_ahead() -> None:
    async def scene() -> None:
        setup = Setup(async_steps=1)
        await setup.batches.collect(1, deliver)
        setup.pool.burst_s = 30.0
        await asyncio.sleep(0.01)
        await setup.batches.close()
        assert setup.pool.requests == []
        with contextlib.suppress(asyncio.CancelledError):
            await setup.batches.wait_for_ahead()

    play(scene)
