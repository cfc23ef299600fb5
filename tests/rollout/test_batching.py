"""When a batch is complete, what stays in flight, what errors leave behind; ``fixed_lag``."""

import asyncio
import time
from dataclasses import replace

import pytest

from bapo_megatron.data.columns import DumpError
from bapo_megatron.errors import RolloutError
from bapo_megatron.rollout.batching import LoopLag
from bapo_megatron.types import RolloutBatch
from tests.fakes.fake_pool import deliver
from tests.rollout.batching_setup import TOTAL_STEPS, Rewards, Setup, ids, make_batches, settle
from tests.rollout.saved_files import file_of, read_file, without_clock


@pytest.mark.parametrize(("partial", "dropped"), [(True, {}), (False, {"surplus": 1})])
async def test_a_synchronous_step_leaves_nothing_in_flight_and_draws_nothing_for_later(
    partial: bool, dropped: dict[str, int]
) -> None:
    setup = Setup(oversample_groups=1, partial=partial)
    batch = await setup.collect(1)
    assert setup.open_groups() == [0, 1, 2]
    assert setup.lines == ["rollout 1: 0/2 groups"]
    assert len({request.seed for request in setup.pool.requests}) == 6
    await setup.give([0], 3)
    await setup.give([1, 2], 4, ends=True)
    assert ids(await batch) == [1, 2]
    texts = [(text.prompt_text, text.answer) for text in setup.texts]
    assert texts == [("prompt 1", "1")] * 2 + [("prompt 2", "2")] * 2
    assert setup.pool.requests == []
    assert setup.batches.state().buffer.next_group_id == 3
    stats = batch.result().stats
    assert (stats.generated_tokens, stats.unfinished_samples) == (22, 2 * partial)
    assert stats.dropped_groups == dropped
    assert len(setup.batches.state().buffer) == partial


async def test_the_time_of_a_batch_goes_on_where_its_tokens_do() -> None:
    setup = Setup()
    state = setup.batches.state()
    setup.batches.restore(replace(state, about=replace(state.about, generation_s=100.0)))
    assert 100 < (await setup.batch(1)).stats.generation_s < 130
    assert setup.batches.state().about.generation_s == 0
    assert (await setup.batch(2)).stats.generation_s < 30


async def test_grading_is_no_part_of_generation() -> None:
    setup = Setup()
    setup.rewards.held[0], setup.rewards.num_timeouts = asyncio.Event(), 3
    batch = await setup.collect(1)
    await setup.give([0, 1], 4, ends=True)
    await asyncio.sleep(0.3)
    assert not batch.done()
    setup.rewards.held[0].set()
    stats = (await batch).stats
    assert stats.generation_s < 0.3
    assert stats.reward_timeouts == 3


async def test_an_asynchronous_step_goes_on_with_the_next_ones_while_the_trainer_works() -> None:
    setup = Setup(async_steps=2)
    batch = await setup.collect(1)
    assert setup.open_groups() == [0, 1, 2, 3, 4, 5]
    await setup.give([0, 1, 3], 4, ends=True)
    assert ids(await batch) == [0, 1]
    await settle()
    # Two steps ahead: groups 2 to 5, of which 3 is finished.
    assert setup.open_groups() == [2, 4, 5]
    await setup.give([2], 1, ends=True)
    batch = await setup.collect(2)
    assert setup.open_groups() == [4, 5, 6, 7]
    assert ids(await batch) == [2, 3]


@pytest.mark.parametrize(
    ("in_flight", "calls"),
    [("abort", ["drain", "reopen"]), ("in_place", ["pause in_place", "resume"])],
)
async def test_a_weight_sync_interrupts_what_is_in_flight_as_configured(
    in_flight: str, calls: list[str]
) -> None:
    setup = Setup(async_steps=1, weight_sync={"in_flight": in_flight})
    batch = await setup.collect(1)
    await setup.give([2, 3], 3)
    await setup.give([0, 1], 4, ends=True)
    await batch
    setup.pool.calls.clear()
    await setup.sync(1)
    assert setup.pool.calls == calls
    assert setup.open_groups() == [2, 3]
    await setup.give([2, 3], 2, ends=True)
    second = await (await setup.collect(2))
    for sample in second.samples:
        assert sample.versions == ((0, 3), (1, 2))
    assert second.stats.resumed_samples == (4 if in_flight == "abort" else 0)


async def test_without_any_server_that_holds_the_weights_the_trainer_is_asked_for_them() -> None:
    setup = Setup()
    batch = await setup.collect(1)
    await setup.give([0], 3)
    setup.pool.needs_weights = True
    await setup.give([1], 4, ends=True)
    assert await batch is None
    setup.pool.needs_weights = False
    await setup.sync(0)
    batch = await setup.collect(1)
    assert setup.open_groups() == [0]
    await setup.give([0], 1, ends=True)
    assert ids(await batch) == [0, 1]


async def test_an_interrupted_step_ends_at_once_and_keeps_what_was_sampled() -> None:
    setup = Setup()
    batch = await setup.collect(1)
    await setup.give([0], 4, ends=True)
    await setup.give([1], 7)
    setup.batches.is_interrupted = True
    assert await batch is None
    assert setup.pool.requests == []
    buffer = setup.batches.state().buffer
    assert [[e.num_tokens for e in group.episodes] for group in buffer] == [[4, 4], [7, 7]]
    assert [group.is_finished for group in buffer] == [True, False]


async def test_a_batch_that_could_not_be_handed_over_changes_nothing_and_comes_again() -> None:
    setup = Setup(
        equal=[2],
        replay={"batches": 1, "share": 0.5},
        oversample_groups=4,
        max_carries=1,
        dynamic_sampling={"enabled": True},
    )
    first = await setup.collect(1)
    await setup.give([3], 2)  # carried for the first time
    await setup.give([0, 1, 2], 3, ends=True)
    assert ids(await first) == [0, 1]
    second = await setup.collect(2)
    setup.failure = DumpError("not intact")
    await setup.give([4], 3, ends=True)
    with pytest.raises(DumpError):
        await second
    state = setup.batches.state()
    assert without_clock(state) == without_clock(setup.state_at_failure)
    assert [[group.group_id for group in batch] for batch in state.buffer.earlier] == [[0, 1]]
    again = await (await setup.collect(2))
    assert sorted(ids(again)) in ([0, 4], [1, 4])
    assert again.stats.dropped_groups == {"carried": 1}
    assert again.stats.generated_tokens == 6
    await setup.batches.close()


@pytest.mark.parametrize("num_ticks", range(4))
async def test_a_cancellation_that_comes_with_news_is_not_lost(num_ticks: int) -> None:
    setup = Setup()
    batch = await setup.collect(1)
    setup.batches._episodes.news.set()
    for _ in range(num_ticks):
        await asyncio.sleep(0)
    batch.cancel()
    await asyncio.wait([batch], timeout=1.0)
    assert batch.cancelled()
    await setup.batches.close()


async def test_an_error_of_a_request_ends_the_step_and_loses_no_token() -> None:
    setup = Setup()
    batch = await setup.collect(1)
    await setup.give([0], 3)
    setup.pool.requests[0].ended.set_exception(RolloutError("no server is left"))
    with pytest.raises(RolloutError, match="no server is left"):
        await batch
    [group, _] = setup.batches.state().buffer
    assert [episode.num_tokens for episode in group.episodes] == [3, 3]
    await setup.batches.close()


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        ({}, {"samples_per_group": 3}),
        ({}, {"max_response_tokens": 3}),
        ({}, {"environment": "mine:Mine"}),
        ({"fixed_lag": 1}, {"fixed_lag": 2}),
        ({"partial_tokens": 5}, {"partial_tokens": 6}),
    ],
)
async def test_a_state_of_other_settings_is_refused(
    saved: dict[str, int], now: dict[str, int]
) -> None:
    setup = Setup(**saved)
    batch = await setup.collect(1)
    await setup.give([0], 4)
    [name] = now
    with pytest.raises(ValueError, match=rf"^rollout\.{name}: .* resume with"):
        Setup(**now).batches.restore(setup.batches.state())
    batch.cancel()


async def test_a_run_that_stops_before_there_are_engines_saves_what_it_restored() -> None:
    setup, batches = Setup(), make_batches(Rewards(()), Setup().batches.scheduler.config)
    await setup.batch(1)
    await setup.collect(2)
    saved = file_of(setup.batches.state())
    batches.restore(read_file(saved))
    assert file_of(batches.state()) == saved
    await setup.batches.close()


async def test_the_lag_of_a_loop_is_the_largest_since_it_was_asked_for() -> None:
    lag = LoopLag()
    measuring = asyncio.create_task(lag.measure())
    await asyncio.sleep(0)
    time.sleep(0.4)  # the loop stands still
    await asyncio.sleep(0.01)
    assert lag.take_max() >= 0.25  # what was due after 0.1 s
    assert lag.take_max() == 0.0
    measuring.cancel()


async def _collect_newest(setup: Setup, step: int) -> RolloutBatch:
    collecting = await setup.collect(step)
    while not collecting.done():
        await setup.give(setup.open_groups()[-1:], 3, ends=True)
    batch = collecting.result()
    assert batch is not None
    return batch


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("resumed_before", [None, 1, 4])
async def test_every_token_of_a_step_is_of_the_weights_of_so_many_steps_before(
    lag: int, resumed_before: int | None
) -> None:
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
        batch = await _collect_newest(setup, step + 1)
        assert ids(batch) == [2 * step, 2 * step + 1]
        assert batch.version == 3 * step
        versions = {span.version for sample in batch.samples for span in sample.versions}
        assert versions == {3 * max(0, step - lag)}
        assert batch.stats.unfinished_samples == batch.stats.resumed_samples == 0
        pausing = asyncio.create_task(setup.batches.pause())
        await settle()
        assert pausing.done() == (not setup.pool.requests)
        while setup.pool.requests:  # the newest first
            await setup.give(setup.open_groups()[-1:], 3, ends=True)
        await pausing
        await setup.sync(3 * (step + 1))
    saved = setup.batches.state().buffer
    assert saved.next_group_id == 2 * TOTAL_STEPS
    assert len(saved) == 0


async def test_weights_that_no_server_holds_any_more_end_the_run() -> None:
    setup = Setup(fixed_lag=1)
    await _collect_newest(setup, 1)
    await settle()
    setup.pool.needs_weights = True
    await setup.give([2], 3, ends=True)
    await setup.batches.pause()
    setup.pool.needs_weights, setup.pool.version = False, 1
    await setup.batches.resume()
    message = r"^rollout\.fixed_lag: .* 1 unfinished ones of version 0 with version 1"
    with pytest.raises(RolloutError, match=message):
        await setup.batches.collect(2, deliver)
