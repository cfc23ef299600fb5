"""Which groups a batch takes: dynamic sampling, ages, carries, replay, ``partial_tokens``."""

import asyncio
from collections import defaultdict

import pytest

from bapo_megatron.config.rollout import EpisodesConfig
from bapo_megatron.environment.base import Step
from bapo_megatron.rollout.episodes import Interaction
from bapo_megatron.types import FinishReason
from tests.fakes.fake_pool import WRITTEN, part_of
from tests.fakes.scripted_environment import ScriptedEnvironment
from tests.rollout.batching_setup import Renderer, Setup, group_of, ids, settle
from tests.rollout.saved_files import file_of, read_file


async def test_at_its_limit_dynamic_sampling_fills_the_batch_with_the_latest_others() -> None:
    setup = Setup(equal=range(50), dynamic_sampling={"enabled": True, "max_groups_ratio": 2})
    batch = await setup.collect(1)
    for _ in range(2):
        await setup.give(setup.open_groups(), 4, ends=True)
    assert ids(await batch) == [2, 3]
    stats = batch.result().stats
    assert stats.equal_reward_groups == 4
    assert stats.filled_groups == 2
    assert stats.dropped_groups == {"equal_rewards": 2}


@pytest.mark.parametrize("in_flight", ["abort", "retract"])
@pytest.mark.parametrize("action", ["drop", "regenerate"])
async def test_responses_that_became_too_old_are_given_up(action: str, in_flight: str) -> None:
    setup = Setup(
        async_steps=1,
        oversample_groups=1,
        staleness={"max_age": 1, "action": action},
        weight_sync={"in_flight": in_flight},
    )
    collecting = await setup.collect(1)
    await setup.give([2], 3)  # will be two versions old
    await setup.give([3], 3, ends=True)
    await setup.give([0, 1], 4, ends=True)
    await collecting
    await setup.sync(2)
    # Dropped ones are not even continued.
    received = [r.received for r in setup.pool.requests if group_of(r) == 2]
    assert received == ([] if action == "drop" else [0, 0])
    groups = [4, 5] if action == "drop" else [2, 3]
    batch = await setup.batch(2, *groups)
    assert ids(batch) == groups
    assert batch.stats.dropped_groups == ({"stale": 2} if action == "drop" else {})
    assert batch.stats.regenerated_samples == (0 if action == "drop" else 4)
    assert all(sample.versions == ((2, 4),) for sample in batch.samples)


@pytest.mark.parametrize("action", ["drop", "regenerate"])
async def test_what_is_scored_during_the_abort_is_judged_by_its_age_too(action: str) -> None:
    staleness = {"max_age": 1, "measure": "mean", "action": action}
    setup = Setup(oversample_groups=1, staleness=staleness)
    held = setup.rewards.held[0] = asyncio.Event()
    assert ids(await setup.batch(1, 0, 1, 2)) == [1, 2]
    await setup.sync(2)
    setup.pool.on_drain = held.set
    batch = await setup.batch(2, 3, 4)
    assert ids(batch) == [3, 4]
    assert batch.stats.dropped_groups == ({"stale": 1} if action == "drop" else {})
    assert batch.stats.regenerated_samples == (0 if action == "drop" else 2)
    await setup.batches.close()


async def test_replay_adds_groups_of_earlier_batches_spread_over_the_updates() -> None:
    setup = Setup(groups_per_step=4, replay={"batches": 2, "share": 0.5})
    assert ids(await setup.batch(1)) == [0, 1, 2, 3]
    await setup.sync(3)
    batch = await setup.batch(2)
    groups = ids(batch)
    assert [group_id for group_id in groups if group_id >= 4] == [4, 5]
    assert {groups[0] >= 4, groups[1] >= 4} == {True, False}  # each update has both
    assert batch.stats.replayed_groups == 2
    for sample in batch.samples:
        assert sample.versions == ((0, 4),) if sample.group_id < 4 else ((3, 4),)


@pytest.mark.parametrize(
    ("groups_per_step", "replay", "num_replayed"),
    [
        (50, {"share": 0.58}, 29),  # 0.58 * 50 is 28.999999999999996
        (4, {"max_age": 2}, 0),
        (4, {"max_age": 3}, 2),
    ],
)
async def test_replay_adds_its_share_of_what_is_young_enough(
    groups_per_step: int, replay: dict[str, float], num_replayed: int
) -> None:
    setup = Setup(groups_per_step=groups_per_step, replay={"batches": 2, "share": 0.5, **replay})
    await setup.batch(1)
    await setup.sync(3)
    assert (await setup.batch(2)).stats.replayed_groups == num_replayed


def limits(setup: Setup) -> dict[int, list[int]]:
    """Position at which each request must stop, by group."""
    by_group = defaultdict[int, list[int]](list)
    for request in setup.pool.requests:
        by_group[group_of(request)].append(request.max_tokens)
    return by_group


async def test_a_response_rests_after_its_tokens_and_continues_in_the_next_round() -> None:
    setup = Setup(partial_tokens=5)
    batch = await setup.collect(1)
    assert limits(setup) == {0: [5, 5], 1: [5, 5]}
    await setup.give([0], 5)
    assert setup.open_groups() == [1]  # nobody takes the place of what rests
    await setup.give([1], 3, ends=True)
    # One group is complete: another round, with two more prompts.
    assert limits(setup) == {0: [10, 10], 2: [5, 5], 3: [5, 5]}
    await setup.give([0], 2, ends=True)
    await setup.give([2], 5)
    assert not batch.done()  # group 3 is still to get its tokens
    await setup.give([3], 4)
    assert not batch.done()
    await setup.give([3], 1)
    assert ids(await batch) == [0, 1]
    stats = batch.result().stats
    assert stats.generated_tokens == 2 * (5 + 3 + 2 + 5 + 5)
    assert stats.resumed_samples == 2
    assert stats.unfinished_samples == 4
    await setup.sync(1)
    assert setup.pool.requests == []

    batch = await setup.collect(2)
    assert limits(setup) == {2: [10, 10], 3: [10, 10], 4: [5, 5], 5: [5, 5]}
    await setup.give([2, 3], 1, ends=True)
    await setup.give([4, 5], 5)
    assert ids(await batch) == [2, 3]
    for sample in batch.result().samples:
        assert sample.versions == ((0, 5), (1, 1))


async def test_the_limits_of_a_round_a_response_and_an_engine_are_told_apart() -> None:
    setup = Setup(partial_tokens=8)
    batch = await setup.collect(1)
    stopped, longest, cut, aborted = setup.pool.requests
    setup.pool.give(stopped, 8, FinishReason.STOP)  # at the very limit
    setup.pool.give(longest, 8)
    setup.pool.give(cut, 3, FinishReason.LENGTH)  # by the engine's own limit
    setup.pool.give(aborted, 7)
    # The last token comes alone, and the request's end without any.
    aborted.on_part(part_of(7, 1, 0, FinishReason.ABORT))
    await settle()
    # Another round has begun, while that request is still open.
    assert limits(setup) == {0: [16], 1: [8], 2: [8, 8], 3: [8, 8]}
    end = part_of(8, 0, 0, FinishReason.LENGTH)
    aborted.on_part(end)
    aborted.ended.set_result(end)
    await setup.give([2, 3], 8)
    assert limits(setup) == {0: [16], 1: [16]}
    await setup.give([1], 1, ends=True)
    await setup.give([0], 8)
    assert limits(setup)[0] == [20]
    await setup.give([0], 4)
    await setup.give([2, 3, 4, 5], 8)
    samples = (await batch).samples
    assert [sample.finish_reason for sample in samples] == ["stop", "length", "length", "stop"]
    assert [sample.num_sampled for sample in samples] == [8, 20, 3, 9]


@pytest.mark.parametrize("loses_weights", [True, False])
async def test_a_round_that_is_interrupted_is_not_begun_again(loses_weights: bool) -> None:
    setup = Setup(partial_tokens=5)
    batch = await setup.collect(1)
    await setup.give([0], 5)
    await setup.give([1], 3)
    setup.pool.needs_weights = loses_weights
    setup.batches.is_interrupted = not loses_weights
    setup.batches._episodes.news.set()
    assert await batch is None
    other = setup
    if not loses_weights:
        other = Setup(partial_tokens=5)
        other.batches.restore(read_file(file_of(setup.batches.state())))
    other.pool.needs_weights = False
    await other.sync(0)
    batch = await other.collect(1)
    assert limits(other) == {1: [5, 5]}
    await other.give([1], 2)
    assert limits(other) == {0: [10, 10], 1: [10, 10], 2: [5, 5], 3: [5, 5]}
    batch.cancel()


async def test_no_round_begins_before_the_scores_are_there_that_decide() -> None:
    setup = Setup(partial_tokens=5, equal=[0], dynamic_sampling={"enabled": True})
    held = setup.rewards.held[1] = asyncio.Event()
    batch = await setup.collect(1)
    await setup.give([0, 1], 2, ends=True)
    assert setup.pool.requests == []
    held.set()
    await settle()
    assert setup.open_groups() == [2, 3]  # group 0 taught nothing
    await setup.give([2, 3], 2, ends=True)
    assert ids(await batch) == [1, 2]


async def test_a_response_that_is_too_old_is_begun_again_with_the_next_round() -> None:
    setup = Setup(partial_tokens=5, staleness={"max_age": 0, "action": "regenerate"})
    batch = await setup.collect(1)
    await setup.give([0, 1], 5)
    await setup.give([0, 1], 1, ends=True)
    await setup.give([2, 3], 5)
    assert ids(await batch) == [0, 1]
    await setup.sync(1)
    batch = await setup.collect(2)
    assert limits(setup) == {2: [5, 5], 3: [5, 5], 4: [5, 5], 5: [5, 5]}
    await setup.give([2, 3], 2, ends=True)
    await setup.give([4, 5], 5)
    assert ids(await batch) == [2, 3]
    assert batch.result().stats.regenerated_samples == 4
    for sample in batch.result().samples:
        assert sample.versions == ((1, 2),)


async def test_what_an_environment_writes_counts_and_may_end_the_round() -> None:
    environment = ScriptedEnvironment(
        lambda state, turn: Step(state, token_ids=[WRITTEN + 3, WRITTEN + 4, WRITTEN + 5])
    )
    setup = Setup(
        partial_tokens=5,
        environment="mine:Mine",
        interaction=Interaction(environment, Renderer(), EpisodesConfig()),
    )
    batch = await setup.collect(1)
    await setup.give([1], 5)
    await setup.give([0], 3, ends=True)
    # Six tokens, three of them written: group 0 rests until the next round, which has begun.
    assert limits(setup) == {0: [11, 11], 1: [10, 10], 2: [5, 5], 3: [5, 5]}
    batch.cancel()
