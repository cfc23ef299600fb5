"""When a batch is complete, what stays in flight, and what errors leave behind."""

from __future__ import annotations

import asyncio

import pytest

from bapo_megatron.data.columns import DumpError
from bapo_megatron.errors import RolloutError
from tests.rollout.batching_setup import TOTAL_STEPS, Setup, ids, play, settle
from tests.rollout.saved_files import without_clock


def test_a_synchronous_step_leaves_nothing_in_flight_and_draws_nothing_for_later() -> None:
    async def scene() -> None:
        setup = Setup(oversample_groups=1)
        batch = setup.collect(1)
        await settle()
        assert setup.open_groups() == [0, 1, 2]
        await setup.give([0], 3)
        await setup.give([1, 2], 4, ends=True)
        assert ids(await batch) == [1, 2]
        assert setup.pool.requests == []
        assert setup.batches.state().buffer.next_group_id == 3

    play(scene)


def test_an_asynchronous_step_goes_on_with_the_next_ones_while_the_trainer_works() -> None:
    async def scene() -> None:
        setup = Setup(async_steps=2)
        batch = setup.collect(1)
        await settle()
        assert setup.open_groups() == [0, 1, 2, 3, 4, 5]
        await setup.give([0, 1, 3], 4, ends=True)
        assert ids(await batch) == [0, 1]
        await settle()
        # Two steps ahead: groups 2 to 5, of which 3 is finished.
        assert setup.open_groups() == [2, 4, 5]
        await setup.give([2], 1, ends=True)
        batch = setup.collect(2)
        await settle()
        assert setup.open_groups() == [4, 5, 6, 7]
        assert ids(await batch) == [2, 3]

    play(scene)


def test_nothing_is_generated_for_steps_after_the_last() -> None:
    async def scene() -> None:
        setup = Setup(async_steps=2)
        batch = setup.collect(TOTAL_STEPS - 1)
        await settle()
        assert setup.open_groups() == [0, 1, 2, 3]
        await setup.give([0, 1], 4, ends=True)
        await batch
        batch = setup.collect(TOTAL_STEPS)
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
        batch = setup.collect(1)
        await settle()
        await setup.give([0, 1], 4, ends=True)
        await setup.give([2, 3], 3)
        await batch
        setup.pool.calls.clear()
        await setup.sync(1)
        assert setup.pool.calls == calls
        assert setup.open_groups() == [2, 3]
        await setup.give([2, 3], 2, ends=True)
        second = await setup.collect(2)
        assert second is not None
        for sample in second.samples:
            assert sample.versions == ((0, 3), (1, 2))
        assert second.stats.resumed_samples == (4 if in_flight == "abort" else 0)

    play(scene)


def test_a_token_budget_ends_the_step_with_what_is_complete() -> None:
    async def scene() -> None:
        setup = Setup(groups_per_step=6, tokens_per_step=20)
        batch = setup.collect(1)
        await settle()
        await setup.give([0, 1, 2], 3, ends=True)  # 18 tokens
        assert not batch.done()
        await setup.give([3], 1)  # 20 tokens
        await asyncio.wait([batch])
        # Three groups are complete; two updates need an even number.
        assert ids(batch.result()) == [0, 1]
        batch = setup.collect(2)
        await settle()
        assert setup.open_groups() == [3, 4, 5, 6, 7]
        await setup.give([4], 10)
        assert not batch.done()  # one group per update at least
        await setup.give([5], 1, ends=True)
        assert ids(await batch) == [2, 5]

    play(scene)


def test_without_any_server_that_holds_the_weights_the_trainer_is_asked_for_them() -> None:
    async def scene() -> None:
        setup = Setup()
        batch = setup.collect(1)
        await settle()
        await setup.give([0], 3)
        setup.pool.needs_weights = True
        await setup.give([1], 4, ends=True)
        assert await batch is None
        setup.pool.needs_weights = False
        await setup.sync(0)
        batch = setup.collect(1)
        await settle()
        assert setup.open_groups() == [0]
        await setup.give([0], 1, ends=True)
        assert ids(await batch) == [0, 1]

    play(scene)


def test_an_interrupted_step_ends_at_once_and_keeps_what_was_sampled() -> None:
    async def scene() -> None:
        setup = Setup()
        batch = setup.collect(1)
        await settle()
        await setup.give([0], 4, ends=True)
        await setup.give([1], 7)
        setup.batches.is_interrupted = True
        assert await batch is None
        assert setup.pool.requests == []
        buffer = setup.batches.state().buffer
        assert [[p.num_tokens for p in group.samples] for group in buffer] == [[4, 4], [7, 7]]
        assert [[p.is_finished for p in group.samples] for group in buffer] == [
            [True, True],
            [False, False],
        ]

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
        first = setup.collect(1)
        await settle()
        await setup.give([3], 2)  # carried for the first time
        await setup.give([0, 1, 2], 3, ends=True)
        assert ids(await first) == [0, 1]
        second = setup.collect(2)
        await settle()
        setup.failure = failure
        await setup.give([4], 3, ends=True)
        with pytest.raises(type(failure)):
            await second
        state = setup.batches.state()
        assert without_clock(state) == without_clock(setup.state_at_failure)
        assert [[group.group_id for group in batch] for batch in state.buffer.earlier] == [[0, 1]]
        again = await setup.collect(2)
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
        batch = setup.collect(1)
        await settle()
        setup.batches._episodes.news.set()
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
        batch = setup.collect(1)
        await settle()
        await setup.give([0], 3)
        setup.pool.requests[0].ended.set_exception(RolloutError("no server is left"))
        with pytest.raises(RolloutError, match="no server is left"):
            await batch
        [group, _] = setup.batches.state().buffer
        assert [pending.num_tokens for pending in group.samples] == [3, 3]
        await setup.batches.close()

    play(scene)
