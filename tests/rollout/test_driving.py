"""What is driven, and how far; that nothing hangs where a task fails or the engine is lost."""

import asyncio
import contextlib
from typing import Any

import pytest

from bapo_megatron.reward.base import RewardError
from tests.fakes.fake_pool import deliver
from tests.fakes.stepped_pool import SteppedPool
from tests.rollout.batching_setup import Setup, group_of, ids


def driven(**rollout: Any) -> Setup:
    """Two groups of two responses per step, of at most 100 tokens, of a stepped engine."""
    return Setup(pool=SteppedPool(), **{"max_response_tokens": 100, **rollout})


async def test_every_decision_is_sixteen_decode_steps_after_the_one_before() -> None:
    setup = driven()
    assert ids(await setup.batches.collect(1, deliver)) == [0, 1]
    assert len(setup.pool.bursts) > 2
    assert set(setup.pool.bursts[:-1]) == {16}
    assert setup.pool.requests == []


@pytest.mark.parametrize(("local", "num_steps"), [({}, 50), ({"decode_steps_ahead": 19}, 19)])
async def test_a_fixed_number_of_decode_steps_is_made_beside_the_training(
    local: dict[str, int], num_steps: int
) -> None:
    # Every response is as long as it may be, and some remain.
    setup = driven(async_steps=2, oversample_groups=6, local=local)
    setup.pool.stop_interval = 1 << 40
    await setup.batches.collect(1, deliver)
    before = len(setup.pool.bursts)
    await setup.batches.pause()
    ahead = setup.pool.bursts[before:]
    assert sum(ahead) == num_steps
    assert ahead[:-1] == [16] * (len(ahead) - 1)
    assert setup.pool.requests == []


async def test_what_fails_beside_the_training_fails_the_next_batch() -> None:
    setup = driven(async_steps=1)
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


async def test_while_a_grader_is_slow_nothing_is_sampled() -> None:
    setup = driven()
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


@pytest.mark.parametrize("async_steps", [0, 1])
async def test_an_engine_that_loses_its_weights_gets_them_again_and_goes_on(
    async_steps: int,
) -> None:
    setup = driven(async_steps=async_steps)
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


async def test_groups_that_teach_nothing_are_replaced_beside_the_training_too() -> None:
    setup = driven(
        async_steps=1, dynamic_sampling={"enabled": True}, local={"decode_steps_ahead": 16}
    )
    setup.rewards.equal = range(2, 100)
    assert ids(await setup.batches.collect(1, deliver)) == [0, 1]
    drawn = setup.batches.state().buffer.next_group_id
    setup.pool.stop_interval = 1  # every response ends at once
    await setup.batches.pause()
    assert setup.pool.bursts[-16:] == [1] * 16
    assert setup.batches.state().buffer.next_group_id >= drawn + 16


async def test_closing_ends_what_is_made_ahead() -> None:
    setup = driven(async_steps=1)
    await setup.batches.collect(1, deliver)
    setup.pool.burst_s = 30.0
    await asyncio.sleep(0.01)
    await setup.batches.close()
    assert setup.pool.requests == []
    with contextlib.suppress(asyncio.CancelledError):
        await setup.batches.wait_for_ahead()
