"""How episodes end: by the environment, by a limit of turns or tokens, or by a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from bapo_megatron.environment.base import EnvironmentFailedError, Step
from bapo_megatron.types import FinishReason
from tests.rollout.batching_setup import play
from tests.rollout.episodes_setup import THREE_TURNS, Setup, script

if TYPE_CHECKING:
    from collections.abc import Callable

    from bapo_megatron.environment.base import Task, Turn


def test_one_turn_more_than_there_may_be_ends_the_episode_with_nothing_written() -> None:
    async def scene() -> None:
        setup = Setup(THREE_TURNS, max_turns=2)
        await setup.begin()
        for _ in range(2):
            await setup.tokens(2, ends=True)
            await setup.answer()
        sample = setup.pending.sample
        assert sample.finish_reason is FinishReason.TURNS
        assert sample.response_token_ids.tolist() == [0, 1, 1100, 1101, 4, 5]
        assert sample.written == ((2, 2),)
        assert setup.pending.state == ["0 1", "4 5"]
        assert setup.pending.is_scored
        assert sample.reward == 1.0

    play(scene)


@pytest.mark.parametrize(
    ("num_written", "is_end"), [(1, False), (6, False), (7, True), (8, True), (1000, True)]
)
def test_what_there_is_no_room_for_is_not_written_and_truncates_the_response(
    num_written: int, is_end: bool
) -> None:
    """Three of ten tokens are sampled; at least one must remain for the next turn."""

    async def scene() -> None:
        setup = Setup(script(Step(None, token_ids=[1100] * num_written)), max_tokens=10)
        await setup.begin()
        await setup.tokens(3, ends=True)
        await setup.answer()
        sample = setup.pending.sample
        if is_end:
            assert sample.finish_reason is FinishReason.LENGTH
            assert sample.response_token_ids.tolist() == [0, 1, 2]
            assert setup.pending.state == ["0 1 2"]
            assert setup.pending.is_scored
            return
        [request] = setup.pool.requests
        assert request.max_tokens - request.received == 7 - num_written
        await setup.tokens(7 - num_written)
        assert setup.pending.sample.finish_reason is FinishReason.LENGTH
        assert len(setup.pending.sample.response_token_ids) == 10
        assert len(setup.environment.turns) == 1

    play(scene)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (Step(None, is_done=True), FinishReason.STOP),
        (Step(None, token_ids=[1100]), FinishReason.LENGTH),
    ],
)
def test_a_turn_that_ends_with_the_last_token_there_may_be_is_answered(
    step: Step, reason: FinishReason
) -> None:
    async def scene() -> None:
        setup = Setup(script(step), max_tokens=5)
        await setup.begin()
        await setup.tokens(5, ends=True)
        assert setup.environment.turns[0].remaining_tokens == 0
        await setup.answer()
        assert setup.pending.sample.finish_reason is reason
        assert setup.pending.sample.written == ()

    play(scene)


def test_a_turn_that_is_truncated_is_not_answered() -> None:
    async def scene() -> None:
        setup = Setup(THREE_TURNS, max_tokens=5)
        await setup.begin()
        await setup.tokens(5)
        assert setup.pending.sample.finish_reason is FinishReason.LENGTH
        assert setup.environment.turns == []
        assert setup.pending.state == []

    play(scene)


# --- failures ---


def _failing(kind: str, message: str = "it is broken; correct it") -> Callable[[Any, Turn], Step]:
    def answer(state: Any, turn: Turn) -> Step:
        raise EnvironmentFailedError(message, kind)

    return answer


def _begin_badly(task: Task) -> Any:
    raise EnvironmentFailedError("it cannot begin; correct it", "timeout")


UNKNOWN_TOKENS = (
    "rollout.environment: its answer to turn 0 of p:0 must have tokens from 0 to 1999, got 2000; "
    "use the model's own tokenizer, or set rollout.episodes.on_error=zero"
)
REFUSED = (
    "rollout.environment: its answer to turn 0 of p:0 is refused by the chat template (no such "
    "role); correct its messages, give token_ids, or set rollout.episodes.on_error=zero"
)
BAD_STEPS = [
    (_failing("error"), "error", "it is broken; correct it"),
    (_failing("timeout"), "timeout", "it is broken; correct it"),
    (script(Step(None, token_ids=[7, 2000, 1])), "tokens", UNKNOWN_TOKENS),
    (
        script(Step(None, messages=[{"role": "x", "content": "refused"}])),
        "tokens",
        REFUSED,
    ),
]


@pytest.mark.parametrize(("answer", "kind", "message"), BAD_STEPS)
def test_an_environment_that_fails_fails_the_run(
    answer: Callable[[Any, Turn], Step], kind: str, message: str
) -> None:
    async def scene() -> None:
        setup = Setup(answer)
        await setup.begin()
        await setup.tokens(3, ends=True)
        setup.episodes.news.clear()
        await setup.answer()
        assert setup.episodes.news.is_set()
        with pytest.raises(EnvironmentFailedError) as raised:
            setup.episodes.raise_failure()
        assert str(raised.value) == message
        assert raised.value.kind == kind
        # Nothing has changed: who asks again gets an answer to the same turn.
        assert setup.pending.awaits_answer
        assert setup.pending.sample.finish_reason is FinishReason.ABORT

    play(scene)


@pytest.mark.parametrize("on_error", ["zero", "mask"])
@pytest.mark.parametrize(("answer", "kind", "message"), BAD_STEPS)
def test_an_environment_that_fails_ends_its_episode_without_a_reward(
    answer: Callable[[Any, Turn], Step], kind: str, message: str, on_error: str
) -> None:
    async def scene() -> None:
        setup = Setup(answer, on_error=on_error)
        await setup.begin()
        await setup.tokens(3, ends=True)
        await setup.answer()
        setup.episodes.raise_failure()
        pending = setup.pending
        assert pending.sample.finish_reason is FinishReason.ENVIRONMENT
        assert pending.sample.response_token_ids.tolist() == [0, 1, 2]
        assert pending.texts == ("0 1 2",)
        assert (pending.sample.reward, pending.sample.answer_found) == (0.0, False)
        assert [response.sample.finish_reason for response in setup.rewards.responses] == [
            "environment"
        ]
        assert setup.interaction.errors == {kind: 1}

    play(scene)


def test_an_environment_that_fails_at_the_start_ends_an_episode_without_tokens() -> None:
    async def scene() -> None:
        setup = Setup(THREE_TURNS, begin=_begin_badly, on_error="zero")
        await setup.begin()
        assert setup.pool.sent == []
        assert setup.pending.sample.finish_reason is FinishReason.ENVIRONMENT
        assert setup.pending.texts == ("",)
        assert setup.interaction.errors == {"timeout": 1}
        resumed = Setup(THREE_TURNS, state=setup.saved())
        await resumed.advance()
        assert resumed.environment.tasks == []

    play(scene)
