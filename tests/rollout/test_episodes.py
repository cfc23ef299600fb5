"""Episodes of several turns: their tokens, their ends, and what survives an abort or a restart."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bapo_megatron.config.rollout import EpisodesConfig, WeightSyncConfig
from bapo_megatron.engine.base import GenerateRequest, SamplingSettings
from bapo_megatron.environment.base import EnvironmentFailedError, Step
from bapo_megatron.reward.base import Score
from bapo_megatron.reward.shaping import ShapedReward
from bapo_megatron.rollout.buffer import RolloutBuffer, buffer_from_json, buffer_to_json
from bapo_megatron.rollout.episodes import Episodes, Interaction
from bapo_megatron.rollout.grading import Grader
from bapo_megatron.types import FinishReason, Prompt
from tests.fakes.fake_pool import WRITTEN, FakePool
from tests.fakes.fake_sglang import FakeSglang, logprob_of, token_at
from tests.fakes.scripted_environment import ScriptedEnvironment
from tests.rollout.batching_setup import Setup as BatchSetup
from tests.rollout.batching_setup import play, settle
from tests.rollout.pool import pool_of, until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bapo_megatron.environment.base import Task, Turn
    from bapo_megatron.reward.base import Response
    from bapo_megatron.rollout.buffer import PendingSample
    from bapo_megatron.rollout.pool import EnginePool

PROMPT = Prompt("p:0", (1, 2), "7", "What?", "p", {"level": 3})
MAX_TOKENS = 40
ABORT = WeightSyncConfig(in_flight="abort")


class Renderer:
    """Its text is the list of ids; a message becomes as many tokens as its content has letters."""

    vocab_size = 2000

    def decode(self, token_ids: Sequence[int], **options: bool) -> str:
        return " ".join(map(str, token_ids))

    def continuation(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        letters = "".join(message["content"] for message in messages)
        if letters == "refused":
            raise ValueError("is refused by the chat template (no such role)")
        return tuple(range(WRITTEN + 500, WRITTEN + 500 + len(letters)))


class CountingRewards:
    """Half a point for each token of the last turn; with a group, one more for the best."""

    def __init__(self) -> None:
        self.responses: list[Response] = []
        """What ``score`` was asked."""
        self.groups: list[list[Response]] = []
        """What ``score_group`` was asked."""
        self.held: asyncio.Event | None = None
        """Groups wait for it."""

    async def score(self, response: Response) -> Score:
        self.responses.append(response)
        if response.sample.finish_reason == "environment":
            return Score(0.0, answer_found=False)
        return Score(len(response.text.split()) / 2, components={"length": 1.0})

    async def score_group(
        self, responses: Sequence[Response], scores: Sequence[Score]
    ) -> list[Score]:
        self.groups.append(list(responses))
        if self.held is not None:
            await self.held.wait()
        best = max(score.reward for score in scores)
        return [
            Score(score.reward + (score.reward == best), answer_found=score.answer_found)
            for score in scores
        ]


class Setup:
    """A group of episodes, each with an environment that follows a script."""

    def __init__(
        self,
        answer: Callable[[Any, Turn], Step],
        *,
        begin: Callable[[Task], Any] = lambda task: [],
        num_samples: int = 1,
        max_tokens: int = MAX_TOKENS,
        state: str | None = None,
        version: int = 0,
        sees_groups: bool = False,
        pool: EnginePool | None = None,
        **episodes: Any,
    ) -> None:
        self.environment = ScriptedEnvironment(answer, begin)
        self.environment.waits = True
        self.pool: Any = FakePool(version) if pool is None else pool
        self.rewards = CountingRewards()
        self.max_tokens = max_tokens
        config = EpisodesConfig.model_validate(episodes)
        self.interaction = Interaction(self.environment, Renderer(), config)
        grader = Grader(Renderer(), self.rewards, sees_groups=sees_groups)
        self.episodes = Episodes(self.pool, self.interaction, grader, self.request_of)
        self.buffer = RolloutBuffer()
        if state is None:
            self.buffer.start_group(PROMPT, num_samples)
        else:
            buffer_from_json(self.buffer, json.loads(state))
        [self.group] = self.buffer

    def request_of(self, pending: PendingSample) -> GenerateRequest:
        sample = pending.sample
        return GenerateRequest(
            input_ids=pending.prompt.token_ids,
            sampling=SamplingSettings(0.5, self.max_tokens, seed=100 + sample.index),
            label=f"sample {sample.index}",
            order=(sample.group_id, sample.index),
        )

    @property
    def pending(self) -> PendingSample:
        return self.group.samples[0]

    async def advance(self) -> None:
        self.episodes.advance(self.buffer)
        await settle()

    async def begin(self) -> None:
        """Every episode is begun."""
        await self.advance()
        await self.answer()

    async def answer(self, count: int | None = None) -> None:
        """Let environments answer."""
        self.environment.let_answer(count)
        await settle()

    async def tokens(self, count: int, *, ends: bool = False, index: int = 0) -> None:
        """Let a sample receive tokens; with ``ends`` the last one ends its turn."""
        [request] = [r for r in self.pool.requests if r.label == f"sample {index}"]
        self.pool.give(request, count, FinishReason.STOP if ends else FinishReason.ABORT)
        await settle()

    async def push(self, version: int) -> None:
        await self.episodes.pause(ABORT)
        self.pool.version = version
        await self.episodes.resume(self.buffer)
        await settle()

    def saved(self) -> str:
        return json.dumps(buffer_to_json(self.buffer))


def script(*steps: Step) -> Callable[[Any, Turn], Step]:
    """The answers to the turns, in order; the state counts what was heard."""

    def answer(state: list[str], turn: Turn) -> Step:
        step = steps[turn.number]
        return Step([*state, turn.text], step.messages, step.token_ids, step.is_done)

    return answer


THREE_TURNS = script(
    Step(None, token_ids=[1100, 1101]),
    Step(None, messages=[{"role": "user", "content": "m"}]),
    Step(None, is_done=True),
)
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


# --- ends ---


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


# --- groups ---

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
        collecting = setup.collect(0)
        await settle()
        await setup.give([0], 1, ends=True)  # both fail
        await setup.give([1], 2, ends=True)
        first = await collecting
        assert first is not None
        assert first.stats.environment_errors == {"error": 2}
        await settle()
        await setup.give([2], 1, ends=True)  # beside the training
        state = json.loads(json.dumps(setup.batches.state()))
        assert state["counted"]["environment_errors"] == {"error": 2}
        resumed = _batches_with_environment()
        resumed.batches.restore(state)
        assert json.loads(json.dumps(resumed.batches.state())) == state
        for again in (setup, resumed):
            collecting = again.collect(1)
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
