"""Episodes in their groups, whose rewards come together, and in batches."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from bapo_megatron.config.rollout import EpisodesConfig
from bapo_megatron.environment.base import EnvironmentFailedError, Step
from bapo_megatron.reward.shaping import ShapedReward
from bapo_megatron.rollout.episodes import Interaction
from tests.fakes.scripted_environment import ScriptedEnvironment
from tests.rollout.batching_setup import Setup as BatchSetup
from tests.rollout.batching_setup import play, settle
from tests.rollout.episodes_setup import Renderer, Setup, script
from tests.rollout.saved_files import file_of, read_file

if TYPE_CHECKING:
    import numpy as np

    from bapo_megatron.environment.base import Turn
    from bapo_megatron.reward.base import Response, Score

ONE_TURN = script(Step(None, is_done=True))


async def _group(*, state: str | None = None, num_ended: int = 3, **options: Any) -> Setup:
    """A group of three, in which sample n has n + 1 tokens."""
    setup = Setup(
        options.pop("answer", ONE_TURN), num_samples=3, sees_groups=True, state=state, **options
    )
    setup.environment.waits = False
    await setup.advance()
    for index in range(num_ended):
        await setup.tokens(index + 1, ends=True, index=index)
    return setup


def _rewards(setup: Setup) -> list[float | None]:
    """By sample; None: it has none yet."""
    return [p.sample.reward if p.is_scored else None for p in setup.group.samples]


def test_a_group_reward_is_given_to_all_when_the_last_one_has_ended() -> None:
    async def scene() -> None:
        setup = await _group(num_ended=2)
        assert _rewards(setup) == [None, None, None]
        assert setup.rewards.groups == []
        await setup.tokens(3, ends=True, index=2)
        assert _rewards(setup) == [0.5, 1.0, 2.5]
        [responses] = setup.rewards.groups
        assert [response.text for response in responses] == ["0", "0 1", "0 1 2"]
        assert len(setup.rewards.responses) == 3
        assert setup.group.to_group().samples[2].reward_components == {}

    play(scene)


@pytest.mark.parametrize("num_ended", [1, 2, 3])
def test_a_restored_group_gets_the_same_rewards(num_ended: int) -> None:
    async def scene() -> None:
        setup = await _group(num_ended=num_ended)
        resumed = await _group(state=setup.saved(), num_ended=0)
        for index in range(num_ended, 3):
            await resumed.tokens(index + 1, ends=True, index=index)
        assert _rewards(resumed) == [0.5, 1.0, 2.5]
        assert len(resumed.rewards.groups) == (num_ended < 3)

    play(scene)


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_member_that_is_begun_again_takes_the_rewards_of_all(is_restored: bool) -> None:
    async def scene() -> None:
        setup = await _group()
        if is_restored:
            setup = await _group(state=setup.saved(), num_ended=0)
        best = setup.group.samples[2]
        setup.episodes.cancel(best)
        setup.group.start_again([best], sees_groups=True)
        assert _rewards(setup) == [None, None, None]
        await setup.advance()
        assert _rewards(setup) == [None, None, None]
        await setup.tokens(1, ends=True, index=2)
        assert _rewards(setup) == [0.5, 2.0, 0.5]

    play(scene)


def test_a_group_reward_of_a_member_that_was_begun_again_meanwhile_is_not_used() -> None:
    async def scene() -> None:
        setup = await _group(num_ended=2)
        setup.rewards.held = asyncio.Event()
        await setup.tokens(3, ends=True, index=2)
        assert len(setup.rewards.groups) == 1
        best = setup.group.samples[2]
        setup.episodes.cancel(best)
        setup.group.start_again([best], sees_groups=True)
        await setup.advance()
        setup.rewards.held.set()
        await settle()
        assert _rewards(setup) == [None, None, None]
        await setup.tokens(1, ends=True, index=2)
        assert _rewards(setup) == [0.5, 2.0, 0.5]

    play(scene)


def test_a_failed_episode_has_no_reward_of_its_group_either() -> None:
    def answer(state: Any, turn: Turn) -> Step:
        if len(turn.token_ids) == 3:
            raise EnvironmentFailedError("it is broken", "error")
        return Step(state, is_done=True)

    async def scene() -> None:
        setup = await _group(answer=answer, on_error="zero")
        assert _rewards(setup) == [0.5, 2.0, 0.0]
        assert [len(group) for group in setup.rewards.groups] == [3]
        resumed = await _group(state=setup.saved(), num_ended=0)
        assert _rewards(resumed) == [0.5, 2.0, 0.0]

    play(scene)


class SlowShaping:
    """Takes as long as the test wants for the second sample; gives a tenth to all."""

    def __init__(self) -> None:
        self.is_over = asyncio.Event()

    async def apply(
        self, score: Score, response: Response, token_ids_Q: np.ndarray
    ) -> ShapedReward:
        if len(token_ids_Q) == 2:
            await self.is_over.wait()
        return ShapedReward(score.reward + 0.125, {"tenth": 0.125})


def test_a_group_has_either_all_its_rewards_or_none() -> None:
    async def scene() -> None:
        setup = await _group(num_ended=0)
        shaping = SlowShaping()
        setup.episodes.grader.shaping = shaping
        for index in range(3):
            await setup.tokens(index + 1, ends=True, index=index)
        assert _rewards(setup) == [None, None, None]
        resumed = await _group(state=setup.saved(), num_ended=0)
        assert _rewards(resumed) == [0.5, 1.0, 2.5]
        shaping.is_over.set()
        await settle()
        assert _rewards(setup) == [0.625, 1.125, 2.625]

    play(scene)


# --- batches ---


def _batches_with_environment() -> BatchSetup:
    """One step ahead; an episode fails where its only turn has one token."""

    def answer(state: Any, turn: Turn) -> Step:
        if len(turn.token_ids) == 1:
            raise EnvironmentFailedError("it is broken", "error")
        return Step(None, is_done=True)

    interaction = Interaction(
        ScriptedEnvironment(answer), Renderer(), EpisodesConfig(on_error="zero")
    )
    return BatchSetup(interaction=interaction, environment="mine:Mine", async_steps=1)


def test_failures_of_environments_are_counted_for_the_batch_after_which_they_came() -> None:
    async def scene() -> None:
        setup = _batches_with_environment()
        collecting = setup.collect(1)
        await settle()
        await setup.give([0], 1, ends=True)  # both fail
        await setup.give([1], 2, ends=True)
        first = await collecting
        assert first is not None
        assert first.stats.environment_errors == {"error": 2}
        await settle()
        await setup.give([2], 1, ends=True)  # beside the training
        state = setup.batches.state()
        assert state.about.counted.environment_errors == {"error": 2}
        resumed = _batches_with_environment()
        resumed.batches.restore(read_file(file_of(state)))
        assert file_of(resumed.batches.state()) == file_of(state)
        for again in (setup, resumed):
            collecting = again.collect(2)
            await settle()
            await again.give([3], 1, ends=True)
            second = await collecting
            assert second is not None
            assert second.stats.environment_errors == {"error": 4}

    play(scene)


def test_a_state_of_another_environment_is_refused() -> None:
    state = BatchSetup().batches.state()
    with pytest.raises(
        ValueError, match=r"rollout\.environment: was single_turn when .* is mine:Mine now"
    ):
        _batches_with_environment().batches.restore(state)
