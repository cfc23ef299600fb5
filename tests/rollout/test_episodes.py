"""Episodes of several turns: their tokens, and what survives an abort, a restart, a lost server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bapo_megatron.config.rollout import WeightSyncConfig
from bapo_megatron.environment.base import Step
from bapo_megatron.types import FinishReason
from tests.fakes.fake_sglang import FakeSglang, logprob_of, token_at
from tests.rollout.batching_setup import play, settle
from tests.rollout.episodes_setup import MAX_TOKENS, THREE_TURNS, Setup, script
from tests.rollout.pool import pool_of, until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bapo_megatron.rollout.buffer import PendingSample

HISTORY: list[tuple[str, Any]] = [
    ("begin", None),
    ("tokens", 2),
    ("push", 1),  # within a turn
    ("tokens", 1),
    ("turn", 2),
    ("push", 2),  # while the environment is asked
    ("answer", None),
    ("push", 3),  # after its answer, before the next turn
    ("tokens", 1),
    ("turn", 1),
    ("stop", None),
    ("answer", None),
    ("advance", None),
    ("tokens", 1),
    ("stop", None),
    ("advance", None),
    ("turn", 1),
    ("answer", None),
]


async def _play(setup: Setup, history: Sequence[tuple[str, Any]]) -> None:
    for event, argument in history:
        match event:
            case "begin":
                await setup.begin()
            case "tokens":
                await setup.tokens(argument)
            case "turn":
                await setup.tokens(argument, ends=True)
            case "push":
                await setup.push(argument)
            case "answer":
                await setup.answer()
            case "stop":
                await setup.episodes.stop()
                await settle()
            case "advance":
                await setup.advance()


def _check_history(pending: PendingSample) -> None:
    sample = pending.sample
    assert sample.finish_reason is FinishReason.STOP
    assert sample.response_token_ids.tolist() == [0, 1, 2, 3, 4, 1100, 1101, 7, 8, 1500, 10, 11]
    assert sample.written == ((5, 2), (9, 1))
    assert sample.versions == ((0, 2), (1, 3), (3, 4))
    assert sample.behaviour_logprobs.tolist() == [
        -(token + 1) / 16 - 100 * version
        for token, version in (
            (0, 0),
            (1, 0),
            (2, 1),
            (3, 1),
            (4, 1),
            (7, 3),
            (8, 3),
            (10, 3),
            (11, 3),
        )
    ]
    assert sample.behaviour_logprobs.dtype == np.float32
    assert pending.texts == ("0 1 2 3 4", "1100 1101", "7 8", "1500", "10 11")
    assert pending.state == ["0 1 2 3 4", "7 8", "10 11"]
    assert sample.reward == 1.0


def test_an_episode_keeps_every_token_of_every_version_and_the_engine_continues_exactly_those() -> (
    None
):
    async def scene() -> None:
        setup = Setup(THREE_TURNS)
        await _play(setup, HISTORY)
        _check_history(setup.pending)
        first = [1, 2, 0, 1, 2, 3, 4, 1100, 1101]
        second = [*first, 7, 8, 1500]
        assert [list(request.input_ids) for request in setup.pool.sent] == [
            [1, 2],
            [1, 2, 0, 1],
            first,  # after the answer
            first,  # after the push
            second,
            [*second, 10],
        ]
        for request in setup.pool.sent:
            assert request.max_tokens == MAX_TOKENS
            assert (request.seed, request.order) == (100, (0, 0))
        assert setup.episodes.generated_tokens == 9
        assert setup.episodes.resumed_samples == 2
        assert setup.episodes.finished_samples == 1
        [task] = setup.environment.tasks
        assert (task.prompt_id, task.source, task.prompt, task.answer) == ("p:0", "p", "What?", "7")
        assert (task.row, task.seed) == ({"level": 3}, 100)
        assert [
            (turn.number, turn.text, turn.token_ids, turn.remaining_tokens, turn.prompt_id)
            for turn in setup.environment.turns
        ] == [
            (0, "0 1 2 3 4", (0, 1, 2, 3, 4), 35, "p:0"),
            (1, "7 8", (7, 8), 31, "p:0"),
            (2, "10 11", (10, 11), 28, "p:0"),
        ]
        [response] = setup.rewards.responses
        assert response.turns == ("0 1 2 3 4", "1100 1101", "7 8", "1500", "10 11")
        assert response.state == ["0 1 2 3 4", "7 8", "10 11"]
        assert (response.sample.num_turns, response.sample.environment_tokens) == (3, 3)
        assert response.sample.num_tokens == 12

    play(scene)


@pytest.mark.parametrize("killed_after", range(len(HISTORY) + 1))
def test_an_episode_restored_at_any_moment_ends_as_if_nothing_had_happened(
    killed_after: int,
) -> None:
    async def scene() -> None:
        setup = Setup(THREE_TURNS)
        await _play(setup, HISTORY[:killed_after])
        resumed = Setup(THREE_TURNS, state=setup.saved(), version=setup.pool.version)
        assert resumed.saved() == setup.saved()
        resumed.environment.waits = False
        if setup.episodes.is_running:
            await resumed.advance()
        await setup.episodes.close()
        await _play(resumed, HISTORY[killed_after:])
        _check_history(resumed.pending)

    play(scene)


def test_stop_does_not_wait_for_an_environment_and_nothing_is_sampled_until_it_goes_on() -> None:
    async def scene() -> None:
        setup = Setup(THREE_TURNS)
        await setup.begin()
        await setup.tokens(3, ends=True)
        async with asyncio.timeout(1):
            await setup.episodes.stop()
        assert setup.pending.awaits_answer
        await setup.answer()
        assert setup.pending.sample.written == ((3, 2),)
        assert len(setup.pool.sent) == 1
        await setup.advance()
        assert len(setup.pool.sent) == 2
        assert len(setup.environment.turns) == 1

    play(scene)


def test_an_episode_that_ends_while_nothing_is_sampled_is_scored() -> None:
    async def scene() -> None:
        setup = Setup(script(Step(None, is_done=True)))
        await setup.begin()
        await setup.tokens(3, ends=True)
        await setup.episodes.stop()
        await setup.answer()
        assert setup.pending.is_scored
        assert setup.pending.sample.reward == 1.5

    play(scene)


def test_an_environment_that_answers_after_generation_went_on_is_asked_once() -> None:
    async def scene() -> None:
        setup = Setup(THREE_TURNS)
        await setup.begin()
        await setup.tokens(3, ends=True)
        await setup.push(1)
        await setup.push(2)
        await setup.answer()
        assert len(setup.environment.turns) == 1
        assert len(setup.pool.requests) == 1

    play(scene)


def test_requests_that_stay_in_the_engine_during_a_push_do_so_beside_one_that_begins() -> None:
    async def scene() -> None:
        setup = Setup(THREE_TURNS, num_samples=2)
        await setup.begin()
        await setup.tokens(1)
        await setup.tokens(1, index=1, ends=True)
        await setup.episodes.pause(WeightSyncConfig(in_flight="retract"))
        await setup.answer()
        setup.pool.version = 1
        await setup.episodes.resume(setup.buffer)
        await settle()
        assert setup.pool.calls == ["reopen", "pause retract", "resume"]
        await setup.tokens(1)
        await setup.tokens(2, index=1)
        for pending in setup.group.samples:
            pending.settle()
        one, other = (pending.sample for pending in setup.group.samples)
        assert one.versions == ((0, 1), (1, 1))
        assert other.versions == ((0, 1), (1, 2))
        assert other.response_token_ids.tolist() == [0, 1100, 1101, 3, 4]

    play(scene)


# --- requests that are lost ---


def test_a_turn_whose_server_dies_goes_on_elsewhere_with_what_was_written() -> None:
    async def scene() -> None:
        # Positions: a prompt of 2, eleven tokens up to the end of the turn, 2 written.
        with FakeSglang(stop_at=12, stalls={15: 4}) as one, FakeSglang(stop_at=30) as other:
            async with pool_of(one, other, stream_tokens=1) as pool:
                await pool.states.wait_for_engines()
                setup = Setup(THREE_TURNS, pool=pool, max_tokens=23)
                await setup.begin()
                await until(lambda: len(setup.environment.turns) == 1)
                one.stop_at = 30
                await setup.answer()
                await until(lambda: setup.pending.num_tokens == 17)
                one.crash()
                await until(lambda: setup.pending.is_scored)
                setup.episodes.raise_failure()
                assert pool.num_lost_requests == 1
        sample = setup.pending.sample
        sampled = [token_at(position) for position in (*range(2, 13), *range(15, 25))]
        assert sample.response_token_ids.tolist() == [*sampled[:11], 1100, 1101, *sampled[11:]]
        assert sample.written == ((11, 2),)
        assert sample.versions == ((0, 21),)
        np.testing.assert_allclose(
            sample.behaviour_logprobs, [logprob_of(token, 0.5) for token in sampled], rtol=1e-6
        )
        assert sample.finish_reason is FinishReason.LENGTH
        [continued] = other.requests
        assert continued["input_ids"] == [1, 2, *sample.response_token_ids.tolist()[:17]]

    play(scene)


# --- responses that are begun again ---


@pytest.mark.parametrize("moment", ["within a turn", "while the environment is asked", "after it"])
def test_an_episode_that_is_begun_again_forgets_its_turns(moment: str) -> None:
    async def scene() -> None:
        setup = Setup(THREE_TURNS)
        await setup.begin()
        await setup.tokens(3, ends=moment != "within a turn")
        if moment == "after it":
            await setup.answer()
        setup.episodes.cancel(setup.pending)
        setup.group.start_again([setup.pending], sees_groups=False)
        await setup.advance()
        assert len(setup.environment.tasks) == 2
        await setup.answer()  # also what the old episode had asked for
        sample = setup.pending.sample
        assert len(sample.response_token_ids) == 0
        assert sample.written == ()
        assert [list(request.input_ids) for request in setup.pool.requests] == [[1, 2]]
        setup.environment.waits = False
        for _ in range(3):
            await setup.tokens(1, ends=True)
        assert setup.pending.texts == ("0", "1100 1101", "3", "1500", "5")
        assert setup.pending.state == ["0", "3", "5"]

    play(scene)
