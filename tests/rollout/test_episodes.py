"""Episodes: their tokens over aborts, restarts and lost servers; their ends; their groups."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from bapo_megatron.environment.base import EnvironmentFailedError, Step, Task, Turn
from bapo_megatron.reward.base import Response, Score
from bapo_megatron.reward.composition import ShapedReward
from bapo_megatron.rollout.buffer import Episode
from bapo_megatron.types import FinishReason
from tests.rollout.batching_setup import settle
from tests.rollout.episodes_setup import MAX_TOKENS, THREE_TURNS, Setup, script

HISTORY: list[Callable[[Setup], Awaitable[None]]] = [
    lambda setup: setup.begin(),
    lambda setup: setup.tokens(2),
    lambda setup: setup.push(1),  # within a turn
    lambda setup: setup.tokens(1),
    lambda setup: setup.tokens(2, ends=True),
    lambda setup: setup.push(2),  # while the environment is asked
    lambda setup: setup.answer(),
    lambda setup: setup.push(3),  # after its answer, before the next turn
    lambda setup: setup.tokens(1),
    lambda setup: setup.tokens(1, ends=True),
    lambda setup: setup.stop(),
    lambda setup: setup.answer(),
    lambda setup: setup.advance(),
    lambda setup: setup.tokens(1),
    lambda setup: setup.stop(),
    lambda setup: setup.advance(),
    lambda setup: setup.tokens(1, ends=True),
    lambda setup: setup.answer(),
]


async def _play(setup: Setup, history: Sequence[Callable[[Setup], Awaitable[None]]]) -> None:
    for event in history:
        await event(setup)


def _check_history(episode: Episode) -> None:
    sample = episode.finished()
    assert sample.finish_reason is FinishReason.STOP
    assert sample.response_token_ids.tolist() == [0, 1, 2, 3, 4, 1100, 1101, 7, 8, 1500, 10, 11]
    assert sample.written == ((5, 2), (9, 1))
    assert sample.versions == ((0, 2), (1, 3), (3, 4))
    by_version = (((0, 1), 0), ((2, 3, 4), 1), ((7, 8, 10, 11), 3))
    assert sample.behaviour_logprobs.tolist() == [
        -(token + 1) / 16 - 100 * version for tokens, version in by_version for token in tokens
    ]
    assert sample.behaviour_logprobs.dtype == np.float32
    assert episode.texts == ("0 1 2 3 4", "1100 1101", "7 8", "1500", "10 11")
    assert episode.state == ["0 1 2 3 4", "7 8", "10 11"]
    assert sample.reward == 1.0


async def test_an_episode_keeps_every_token_of_every_version() -> None:
    setup = Setup(THREE_TURNS)
    await _play(setup, HISTORY)
    _check_history(setup.episode)
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
    [task] = setup.environment.tasks
    assert task == Task("p:0", "p", "What?", "7", {"level": 3}, 100)
    assert setup.environment.turns == [
        Turn(0, "0 1 2 3 4", (0, 1, 2, 3, 4), 35, "p:0"),
        Turn(1, "7 8", (7, 8), 31, "p:0"),
        Turn(2, "10 11", (10, 11), 28, "p:0"),
    ]
    [response] = setup.rewards.responses
    assert response.turns == ("0 1 2 3 4", "1100 1101", "7 8", "1500", "10 11")
    assert response.state == ["0 1 2 3 4", "7 8", "10 11"]
    assert (response.sample.num_turns, response.sample.environment_tokens) == (3, 3)
    assert response.sample.num_tokens == 12


@pytest.mark.parametrize("killed_after", range(len(HISTORY) + 1))
async def test_an_episode_restored_at_any_moment_ends_as_if_nothing_had_happened(
    killed_after: int,
) -> None:
    setup = Setup(THREE_TURNS)
    await _play(setup, HISTORY[:killed_after])
    resumed = Setup(THREE_TURNS, state=setup.saved(), version=setup.pool.version)
    assert resumed.saved() == setup.saved()
    resumed.environment.waits = False
    if setup.episodes.is_running:
        await resumed.advance()
    await setup.episodes.close()
    await _play(resumed, HISTORY[killed_after:])
    _check_history(resumed.episode)


async def test_stop_does_not_wait_for_an_environment_and_nothing_is_sampled_after_it() -> None:
    setup = Setup(THREE_TURNS)
    await setup.begin()
    await setup.tokens(3, ends=True)
    async with asyncio.timeout(1):
        await setup.episodes.stop()
    assert setup.episode.awaits_answer
    await setup.answer()
    assert [len(call.written) for call in setup.episode.record.calls] == [2, 2]
    assert len(setup.pool.sent) == 1
    await setup.advance()
    assert len(setup.pool.sent) == 2
    assert len(setup.environment.turns) == 1


async def test_an_episode_that_ends_while_nothing_is_sampled_is_scored() -> None:
    setup = Setup(script(Step(None, is_done=True)))
    await setup.begin()
    await setup.tokens(3, ends=True)
    await setup.episodes.stop()
    await setup.answer()
    assert setup.episode.is_scored
    assert setup.episode.finished().reward == 1.5


async def test_requests_that_stay_during_a_weight_sync_do_so_beside_one_that_begins() -> None:
    setup = Setup(THREE_TURNS, num_samples=2)
    await setup.begin()
    await setup.tokens(1)
    await setup.tokens(1, index=1, ends=True)
    await setup.answer()  # while the engine is paused
    setup.pool.version = 1
    await setup.advance()
    await setup.tokens(1)
    await setup.tokens(2, index=1)
    one, other = (episode.record for episode in setup.group.episodes)
    assert one.versions == ((0, 1), (1, 1))
    assert other.versions == ((0, 1), (1, 2))
    last = other.calls[-1]
    assert [*last.prompt(), *last.turn.token_ids] == [1, 2, 0, 1100, 1101, 3, 4]


@pytest.mark.parametrize("moment", ["within a turn", "while the environment is asked", "after it"])
async def test_an_episode_that_is_begun_again_forgets_its_turns(moment: str) -> None:
    setup = Setup(THREE_TURNS)
    await setup.begin()
    await setup.tokens(3, ends=moment != "within a turn")
    if moment == "after it":
        await setup.answer()
    await setup.restart()
    assert len(setup.environment.tasks) == 2
    await setup.answer()  # also what the old episode had asked for
    [call] = setup.episode.record.calls
    assert (call.num_tokens, call.parent) == (0, None)
    assert [list(request.input_ids) for request in setup.pool.requests] == [[1, 2]]
    setup.environment.waits = False
    for _ in range(3):
        await setup.tokens(1, ends=True)
    assert setup.episode.texts == ("0", "1100 1101", "3", "1500", "5")
    assert setup.episode.state == ["0", "3", "5"]


@pytest.mark.parametrize(
    ("setup", "turns", "reason", "tokens", "state"),
    [
        ({"max_turns": 2}, (2, 2), "turns", [0, 1, 1100, 1101, 4, 5], ["0 1", "4 5"]),
        # Of ten tokens three are sampled; there is no room for another turn.
        ({"max_tokens": 10, "writes": 7}, (3,), "length", [0, 1, 2], ["0 1 2"]),
        ({"max_tokens": 10, "writes": 8}, (3,), "length", [0, 1, 2], ["0 1 2"]),
        ({"max_tokens": 10, "writes": 1000}, (3,), "length", [0, 1, 2], ["0 1 2"]),
        # A turn that ends with the last token there may be is answered, too.
        ({"max_tokens": 3, "writes": 1}, (3,), "length", [0, 1, 2], ["0 1 2"]),
        ({"max_tokens": 3, "writes": 0}, (3,), "stop", [0, 1, 2], ["0 1 2"]),
    ],
)
async def test_an_episode_ends_with_nothing_written_after_its_last_turn(
    setup: dict[str, int], turns: Sequence[int], reason: str, tokens: list[int], state: list[str]
) -> None:
    options = dict(setup)
    answer = THREE_TURNS
    if (num_written := options.pop("writes", None)) is not None:
        answer = script(Step(None, token_ids=[1100] * num_written, is_done=not num_written))
    episode = Setup(answer, **options)
    await episode.begin()
    for num_tokens in turns:
        await episode.turn(num_tokens)
    sample = episode.episode.finished()
    assert sample.finish_reason == reason
    assert sample.response_token_ids.tolist() == tokens
    assert episode.episode.state == state
    assert episode.episode.is_scored
    last = episode.environment.turns[-1]
    assert last.remaining_tokens == options.get("max_tokens", MAX_TOKENS) - len(tokens)


@pytest.mark.parametrize("num_written", [1, 6])
async def test_what_there_is_room_for_is_written_and_the_limit_ends_the_next_turn(
    num_written: int,
) -> None:
    setup = Setup(script(Step(None, token_ids=[1100] * num_written)), max_tokens=10)
    await setup.begin()
    await setup.turn(3)
    [request] = setup.pool.requests
    assert request.max_tokens - request.received == 7 - num_written
    await setup.tokens(7 - num_written)
    assert setup.episode.finished().finish_reason is FinishReason.LENGTH
    assert len(setup.episode.finished().response_token_ids) == 10
    assert len(setup.environment.turns) == 1  # a turn that is truncated is not answered


def _failing(kind: str) -> Callable[[Any, Turn], Step]:
    def answer(state: Any, turn: Turn) -> Step:
        raise EnvironmentFailedError("it is broken; correct it", kind)

    return answer


def _begin_badly(task: Task) -> Any:
    raise EnvironmentFailedError("it cannot begin; correct it", "timeout")


TURN = r"^rollout\.environment: its answer to turn 0 of p:0 "
BAD_STEPS = [
    (_failing("error"), "error", "^it is broken; correct it$"),
    (_failing("timeout"), "timeout", "^it is broken; correct it$"),
    (script(Step(None, token_ids=[7, 4096, 1])), "tokens", f"{TURN}.* to 4095, got 4096; "),
    (script(Step(None, messages=[{"content": "refused"}])), "tokens", f"{TURN}is refused .*; "),
]


@pytest.mark.parametrize(("answer", "kind", "message"), BAD_STEPS)
async def test_an_environment_that_fails_fails_the_run(
    answer: Callable[[Any, Turn], Step], kind: str, message: str
) -> None:
    setup = Setup(answer)
    await setup.begin()
    await setup.tokens(3, ends=True)
    setup.episodes.news.clear()
    await setup.answer()
    assert setup.episodes.news.is_set()
    with pytest.raises(EnvironmentFailedError, match=message) as raised:
        setup.episodes.raise_failure()
    assert raised.value.kind == kind
    # Nothing has changed: who asks again gets an answer to the same turn.
    assert setup.episode.awaits_answer
    assert not setup.episode.is_finished


@pytest.mark.parametrize("on_error", ["zero", "mask"])
@pytest.mark.parametrize(("answer", "kind"), [step[:2] for step in BAD_STEPS])
async def test_an_environment_that_fails_ends_its_episode_without_a_reward(
    answer: Callable[[Any, Turn], Step], kind: str, on_error: str
) -> None:
    setup = Setup(answer, on_error=on_error)
    await setup.begin()
    await setup.tokens(3, ends=True)
    await setup.answer()
    setup.episodes.raise_failure()
    episode = setup.episode
    assert episode.finished().finish_reason is FinishReason.ENVIRONMENT
    assert episode.finished().response_token_ids.tolist() == [0, 1, 2]
    assert episode.texts == ("0 1 2",)
    assert (episode.finished().reward, episode.finished().answer_found) == (0.0, False)
    assert [response.sample.finish_reason for response in setup.rewards.responses] == [
        "environment"
    ]
    assert setup.interaction.errors == {kind: 1}


async def test_an_environment_that_fails_at_the_start_ends_an_episode_without_tokens() -> None:
    setup = Setup(THREE_TURNS, begin=_begin_badly, on_error="zero")
    await setup.begin()
    assert setup.pool.sent == []
    assert setup.episode.finished().finish_reason is FinishReason.ENVIRONMENT
    assert setup.episode.texts == ("",)
    assert setup.interaction.errors == {"timeout": 1}
    resumed = Setup(THREE_TURNS, state=setup.saved())
    await resumed.advance()
    assert resumed.environment.tasks == []


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
    return [e.finished().reward if e.is_scored else None for e in setup.group.episodes]


async def test_a_group_reward_is_given_to_all_when_the_last_one_has_ended() -> None:
    setup = await _group(num_ended=2)
    assert _rewards(setup) == [None, None, None]
    assert setup.rewards.groups == []
    await setup.tokens(3, ends=True, index=2)
    assert _rewards(setup) == [0.5, 1.0, 2.5]
    [responses] = setup.rewards.groups
    assert [response.text for response in responses] == ["0", "0 1", "0 1 2"]
    assert len(setup.rewards.responses) == 3
    assert setup.group.to_group().samples[2].reward_components == {}


@pytest.mark.parametrize("num_ended", [1, 2, 3])
async def test_a_restored_group_gets_the_same_rewards(num_ended: int) -> None:
    setup = await _group(num_ended=num_ended)
    resumed = await _group(state=setup.saved(), num_ended=0)
    for index in range(num_ended, 3):
        await resumed.tokens(index + 1, ends=True, index=index)
    assert _rewards(resumed) == [0.5, 1.0, 2.5]
    assert len(resumed.rewards.groups) == (num_ended < 3)


@pytest.mark.parametrize("is_restored", [False, True])
async def test_a_member_that_is_begun_again_takes_the_rewards_of_all(is_restored: bool) -> None:
    setup = await _group()
    if is_restored:
        setup = await _group(state=setup.saved(), num_ended=0)
    await setup.restart(2, sees_groups=True)
    assert _rewards(setup) == [None, None, None]
    await setup.tokens(1, ends=True, index=2)
    assert _rewards(setup) == [0.5, 2.0, 0.5]


async def test_a_group_reward_of_a_member_that_was_begun_again_meanwhile_is_not_used() -> None:
    setup = await _group(num_ended=2)
    setup.rewards.held = asyncio.Event()
    await setup.tokens(3, ends=True, index=2)
    assert len(setup.rewards.groups) == 1
    await setup.restart(2, sees_groups=True)
    setup.rewards.held.set()
    await settle()
    assert _rewards(setup) == [None, None, None]
    await setup.tokens(1, ends=True, index=2)
    assert _rewards(setup) == [0.5, 2.0, 0.5]


async def test_what_a_function_says_can_be_stored_and_its_lack_of_time_is_counted() -> None:
    async def score(response: Response) -> Score:
        return Score(1.0, extracted="\ud800 7", reason="a\udfffb", timed_out=True)

    setup = Setup(ONE_TURN)
    setup.rewards.score = score  # type: ignore[method-assign]
    await setup.begin()
    await setup.turn(3)
    text = setup.episode.text()
    assert (text.extracted, text.reason) == ("? 7", "a?b")
    assert setup.episodes.grader.num_timeouts == 1


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


async def test_a_group_has_either_all_its_rewards_or_none() -> None:
    shaping = SlowShaping()
    setup = await _group(shaping=shaping)
    assert _rewards(setup) == [None, None, None]
    resumed = await _group(state=setup.saved(), num_ended=0)
    assert _rewards(resumed) == [0.5, 1.0, 2.5]
    shaping.is_over.set()
    await settle()
    assert _rewards(setup) == [0.625, 1.125, 2.625]
