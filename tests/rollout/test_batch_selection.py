"""Which groups a batch takes: dynamic sampling, ages, carries and replay."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from bapo_megatron.rollout.selection import merge
from bapo_megatron.types import Group
from tests.rollout.batching_setup import Setup, group_of, ids, play, settle


def test_a_prompt_that_was_carried_too_often_is_dropped_and_counted() -> None:
    async def scene() -> None:
        setup = Setup(oversample_groups=1, max_carries=1)
        for step, finished in enumerate(([1, 2], [3, 4]), 1):
            batch = setup.collect(step)
            await settle()
            await setup.give([0], 2)
            await setup.give(finished, 4, ends=True)
            assert ids(await batch) == finished
            assert batch.result().stats.dropped_groups == ({"carried": 1} if step == 2 else {})
        assert len(setup.batches.state().buffer) == 0

    play(scene)


def test_groups_with_equal_rewards_are_replaced_until_the_batch_is_full() -> None:
    async def scene() -> None:
        setup = Setup(equal=[0, 2], dynamic_sampling={"enabled": True})
        batch = setup.collect(1)
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
        batch = setup.collect(1)
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
        batch = setup.collect(1)
        await settle()
        await setup.give([0, 1], 4, ends=True)
        await setup.give([2], 3)  # will be two versions old
        await setup.give([3], 3, ends=True)
        await batch
        await setup.sync(2)
        if action == "drop":  # not even continued
            assert 2 not in setup.open_groups()
        else:
            assert [r.received for r in setup.pool.requests if group_of(r) == 2] == [0, 0]
        batch = setup.collect(2)
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
            assert sample.versions == ((2, 4),)

    play(scene)


@pytest.mark.parametrize("action", ["drop", "regenerate"])
def test_what_is_scored_while_the_rest_is_aborted_is_judged_by_its_age_too(action: str) -> None:
    async def scene() -> None:
        setup = Setup(
            oversample_groups=1, staleness={"max_age": 1, "measure": "mean", "action": action}
        )
        held = setup.rewards.held[0] = asyncio.Event()
        batch = setup.collect(1)
        await settle()
        await setup.give([0, 1, 2], 4, ends=True)
        assert ids(await batch) == [1, 2]
        await setup.sync(2)
        batch = setup.collect(2)
        await settle()
        setup.pool.on_drain = held.set
        await setup.give([3, 4], 4, ends=True)
        assert ids(await batch) == [3, 4]
        stats = batch.result().stats
        assert stats.dropped_groups == ({"stale": 1} if action == "drop" else {})
        assert stats.regenerated_samples == (0 if action == "drop" else 2)
        await setup.batches.close()

    play(scene)


def test_replay_adds_groups_of_earlier_batches_spread_over_the_updates() -> None:
    async def scene() -> None:
        setup = Setup(groups_per_step=4, replay={"batches": 2, "share": 0.5})
        first = setup.collect(1)
        await settle()
        await setup.give([0, 1, 2, 3], 4, ends=True)
        assert ids(await first) == [0, 1, 2, 3]
        await setup.sync(3)
        second = setup.collect(2)
        await settle()
        assert setup.open_groups() == [4, 5]
        await setup.give([4, 5], 4, ends=True)
        groups = ids(await second)
        assert [group_id for group_id in groups if group_id >= 4] == [4, 5]
        assert {groups[0] >= 4, groups[1] >= 4} == {True, False}  # each update has both
        assert second.result().stats.replayed_groups == 2
        old = [s for s in second.result().samples if s.group_id < 4]
        assert all([span.version for span in sample.versions] == [0] for sample in old)

    play(scene)


def test_a_share_that_floating_point_cannot_hold_still_gives_all_its_groups() -> None:
    async def scene() -> None:
        setup = Setup(groups_per_step=50, replay={"batches": 1, "share": 0.58})
        first = setup.collect(1)
        await settle()
        await setup.give(list(range(50)), 4, ends=True)
        await first
        await setup.sync(3)
        second = setup.collect(2)
        await settle()
        await setup.give(setup.open_groups(), 4, ends=True)
        assert (await second).stats.replayed_groups == 29  # 0.58 * 50 is 28.999999999999996

    play(scene)


def test_groups_kept_for_replay_must_have_the_size_of_new_ones() -> None:
    async def scene() -> None:
        setup = Setup(replay={"batches": 1})
        batch = setup.collect(1)
        await settle()
        await setup.give([0, 1], 4, ends=True)
        await batch
        state = setup.batches.state()
        assert len(state.buffer) == 0
        other = Setup(replay={"batches": 1}, samples_per_group=3)
        with pytest.raises(ValueError, match=r"samples_per_group: was 2 when group 0 .* is 3 now"):
            other.batches.restore(state)

    play(scene)


def test_replay_leaves_out_groups_beyond_its_age_limit() -> None:
    async def scene() -> None:
        setup = Setup(groups_per_step=4, replay={"batches": 2, "max_age": 2})
        first = setup.collect(1)
        await settle()
        await setup.give([0, 1, 2, 3], 4, ends=True)
        await first
        await setup.sync(3)
        second = setup.collect(2)
        await settle()
        assert setup.open_groups() == [4, 5, 6, 7]
        await setup.give([4, 5, 6, 7], 4, ends=True)
        assert (await second).stats.replayed_groups == 0

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
