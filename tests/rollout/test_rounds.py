"""Rounds of ``rollout.partial_tokens``: who gets how many tokens when, and what a batch then is."""

from __future__ import annotations

import asyncio

import pytest

from bapo_megatron.config.rollout import EpisodesConfig
from bapo_megatron.environment.base import Step
from bapo_megatron.rollout.episodes import Interaction
from bapo_megatron.types import FinishReason
from tests.fakes.fake_pool import WRITTEN, part_of
from tests.fakes.scripted_environment import ScriptedEnvironment
from tests.rollout.batching_setup import Setup, group_of, ids, play, settle
from tests.rollout.episodes_setup import Renderer
from tests.rollout.saved_files import file_of, read_file


def limits(setup: Setup) -> dict[int, list[int]]:
    """Position at which each request must stop, by group."""
    found: dict[int, list[int]] = {}
    for request in setup.pool.requests:
        found.setdefault(group_of(request), []).append(request.max_tokens)
    return found


def test_a_response_rests_after_its_tokens_and_goes_on_in_the_next_round() -> None:
    async def scene() -> None:
        setup = Setup(partial_tokens=5)
        batch = setup.collect(1)
        await settle()
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

        batch = setup.collect(2)
        await settle()
        assert limits(setup) == {2: [10, 10], 3: [10, 10], 4: [5, 5], 5: [5, 5]}
        await setup.give([2, 3], 1, ends=True)
        await setup.give([4, 5], 5)
        assert ids(await batch) == [2, 3]
        for sample in batch.result().samples:
            assert sample.versions == ((0, 5), (1, 1))

    play(scene)


def test_a_batch_that_is_complete_takes_no_further_round() -> None:
    async def scene() -> None:
        setup = Setup(partial_tokens=5)
        batch = setup.collect(1)
        await settle()
        await setup.give([0], 5)
        await setup.give([1], 1, ends=True)
        await setup.give([0, 2, 3], 1, ends=True)
        assert ids(await batch) == [0, 1]
        batch = setup.collect(2)
        assert ids(await batch) == [2, 3]
        assert batch.result().stats.generated_tokens == 0
        assert setup.batches.state().buffer.next_group_id == 4

    play(scene)


def test_the_limits_of_a_round_a_response_and_an_engine_are_told_apart() -> None:
    async def scene() -> None:
        setup = Setup(partial_tokens=8)
        batch = setup.collect(1)
        await settle()
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
        assert [sample.finish_reason for sample in samples] == [
            FinishReason.STOP,
            FinishReason.LENGTH,
            FinishReason.LENGTH,
            FinishReason.STOP,
        ]
        assert [sample.num_sampled for sample in samples] == [8, 20, 3, 9]

    play(scene)


@pytest.mark.parametrize("loses_weights", [True, False])
def test_a_round_that_is_interrupted_is_not_begun_again(loses_weights: bool) -> None:
    async def scene() -> None:
        setup = Setup(partial_tokens=5)
        batch = setup.collect(1)
        await settle()
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
        batch = other.collect(1)
        await settle()
        assert limits(other) == {1: [5, 5]}
        await other.give([1], 2)
        assert limits(other) == {0: [10, 10], 1: [10, 10], 2: [5, 5], 3: [5, 5]}
        batch.cancel()

    play(scene)


def test_a_checkpoint_is_continued_with_the_same_rounds() -> None:
    saved = Setup(partial_tokens=5).batches.state()
    with pytest.raises(ValueError, match=r"rollout.partial_tokens: was 5 when .* and is 6 now"):
        Setup(partial_tokens=6).batches.restore(saved)


def test_no_round_begins_before_the_scores_are_there_that_decide() -> None:
    async def scene() -> None:
        setup = Setup(partial_tokens=5, equal=[0], dynamic_sampling={"enabled": True})
        held = setup.rewards.held[1] = asyncio.Event()
        batch = setup.collect(1)
        await settle()
        await setup.give([0, 1], 2, ends=True)
        assert setup.pool.requests == []
        held.set()
        await settle()
        assert setup.open_groups() == [2, 3]  # group 0 taught nothing
        await setup.give([2, 3], 2, ends=True)
        assert ids(await batch) == [1, 2]

    play(scene)


def test_a_response_that_is_too_old_is_begun_again_with_the_next_round() -> None:
    async def scene() -> None:
        setup = Setup(partial_tokens=5, staleness={"max_age": 0, "action": "regenerate"})
        batch = setup.collect(1)
        await settle()
        await setup.give([0, 1], 5)
        await setup.give([0, 1], 1, ends=True)
        await setup.give([2, 3], 5)
        assert ids(await batch) == [0, 1]
        await setup.sync(1)
        batch = setup.collect(2)
        await settle()
        assert limits(setup) == {2: [5, 5], 3: [5, 5], 4: [5, 5], 5: [5, 5]}
        await setup.give([2, 3], 2, ends=True)
        await setup.give([4, 5], 5)
        assert ids(await batch) == [2, 3]
        assert batch.result().stats.regenerated_samples == 4
        for sample in batch.result().samples:
            assert sample.versions == ((1, 2),)

    play(scene)


def test_what_an_environment_writes_counts_and_may_end_the_round() -> None:
    async def scene() -> None:
        environment = ScriptedEnvironment(
            lambda state, turn: Step(state, token_ids=[WRITTEN + 3, WRITTEN + 4, WRITTEN + 5])
        )
        setup = Setup(
            partial_tokens=5,
            environment="mine:Mine",
            interaction=Interaction(environment, Renderer(), EpisodesConfig()),
        )
        batch = setup.collect(1)
        await settle()
        await setup.give([1], 5)
        await setup.give([0], 3, ends=True)
        # Six tokens, three of them written: group 0 rests until the next round, which has begun.
        assert limits(setup) == {0: [11, 11], 1: [10, 10], 2: [5, 5], 3: [5, 5]}
        batch.cancel()

    play(scene)
