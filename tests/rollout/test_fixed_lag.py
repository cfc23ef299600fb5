"""``rollout.fixed_lag``: each step's responses are of exactly the weights of k steps before."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bapo_megatron.errors import RolloutError
from bapo_megatron.rollout.buffer import RolloutBuffer
from tests.fakes.fake_pool import deliver
from tests.rollout.batching_setup import TOTAL_STEPS, Setup, ids, play, settle
from tests.rollout.saved_files import file_of, read_file

if TYPE_CHECKING:
    from bapo_megatron.types import RolloutBatch


async def complete(setup: Setup) -> None:
    """Let every request end, one after the other, the newest first."""
    while setup.pool.requests:
        await setup.give(setup.open_groups()[-1:], 3, ends=True)


async def collect(setup: Setup, step: int) -> RolloutBatch:
    collecting = setup.collect(step)
    await settle()
    while not collecting.done():
        await setup.give(setup.open_groups()[-1:], 3, ends=True)
    batch = collecting.result()
    assert batch is not None
    return batch


def versions_of(batch: RolloutBatch) -> set[int]:
    return {span.version for sample in batch.samples for span in sample.versions}


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("resumed_before", [None, 1, 4])
def test_every_token_of_a_step_is_of_the_weights_of_so_many_steps_before(
    lag: int, resumed_before: int | None
) -> None:
    async def scene() -> None:
        setup = Setup(fixed_lag=lag)
        for step in range(TOTAL_STEPS):
            if step == resumed_before:
                state = setup.batches.state()
                assert all(group.is_finished for group in state.buffer)
                await setup.batches.close()
                version = setup.pool.version
                setup = Setup(fixed_lag=lag)
                setup.batches.restore(read_file(file_of(state)))
                setup.pool.version = version
            batch = await collect(setup, step + 1)
            assert ids(batch) == [2 * step, 2 * step + 1]
            assert batch.version == 3 * step
            assert versions_of(batch) == {3 * max(0, step - lag)}
            assert batch.stats.unfinished_samples == batch.stats.resumed_samples == 0
            pausing = asyncio.create_task(setup.batches.pause())
            await settle()
            assert pausing.done() == (not setup.pool.requests)
            await complete(setup)
            await pausing
            await setup.sync(3 * (step + 1))
        saved = setup.batches.state().buffer
        assert saved.next_group_id == 2 * TOTAL_STEPS
        assert len(saved) == 0

    play(scene)


def test_a_push_waits_for_the_last_response() -> None:
    async def scene() -> None:
        setup = Setup(fixed_lag=2)
        await collect(setup, 1)
        await settle()
        assert setup.open_groups() == [2, 3, 4, 5]
        pausing = asyncio.create_task(setup.batches.pause())
        await setup.give([2, 3, 4], 3, ends=True)
        assert not pausing.done()
        await setup.give([5], 3, ends=True)
        assert await pausing is False

    play(scene)


def test_weights_that_no_server_holds_any_more_end_the_run() -> None:
    async def scene() -> None:
        setup = Setup(fixed_lag=1)
        await collect(setup, 1)
        await settle()
        setup.pool.needs_weights = True
        await setup.give([2], 3, ends=True)
        await setup.batches.pause()
        setup.pool.needs_weights, setup.pool.version = False, 1
        await setup.batches.resume()
        message = (
            r"^rollout\.fixed_lag: all groups must be complete before new weights are pushed, got "
            r"1 unfinished ones of version 0 with version 1: .*; continue from an earlier "
        )
        with pytest.raises(RolloutError, match=message):
            await setup.batches.collect(2, deliver)
        state = setup.batches.state()
        resumed = Setup(fixed_lag=1)
        resumed.batches.restore(state)
        resumed.pool.version = 1
        with pytest.raises(RolloutError, match=message):
            await resumed.batches.collect(2, deliver)

    play(scene)


def test_the_same_weights_again_complete_the_groups() -> None:
    async def scene() -> None:
        setup = Setup(fixed_lag=1)
        collecting = setup.collect(1)
        await settle()
        await setup.give([0], 2)
        setup.pool.needs_weights = True
        assert await collecting is None
        setup.pool.needs_weights = False
        await setup.sync(0)
        batch = await collect(setup, 1)
        assert ids(batch) == [0, 1]
        assert batch.stats.resumed_samples == 2
        await setup.batches.close()

    play(scene)


def test_what_was_sampled_for_another_lag_or_run_is_refused() -> None:
    async def scene() -> None:
        setup = Setup(fixed_lag=1)
        await collect(setup, 1)
        await complete(setup)
        await setup.batches.wait_for_ahead()
        state = setup.batches.state()
        await setup.batches.close()
        with pytest.raises(ValueError, match=r"^rollout\.fixed_lag: was 1 .* and is 2 now; resume"):
            Setup(fixed_lag=2).batches.restore(state)
        # As at the end of a run, which samples nothing ahead, and is made longer.
        ended = Setup(fixed_lag=1)
        ended.batches.restore(replace(state, buffer=RolloutBuffer()))
        message = (
            r"^rollout\.fixed_lag: the groups of step 2 must .* got 0 .*; resume with the train"
        )
        with pytest.raises(RolloutError, match=message):
            await ended.batches.collect(2, deliver)

    play(scene)
