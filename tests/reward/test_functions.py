import asyncio
import re

import pytest

from bapo_megatron.config.reward import BUILT_IN_FUNCTIONS
from bapo_megatron.reward.base import (
    FunctionFailedError,
    Response,
    RewardError,
    RowError,
    SampleFacts,
    Score,
)
from bapo_megatron.reward.functions import (
    BUILT_IN,
    GRADERS,
    LoadedFunction,
    RewardHandler,
    as_score,
    build,
)
from bapo_megatron.reward.pool import RewardPool
from bapo_megatron.runtime.names import LoadError
from bapo_megatron.runtime.workers import Outcome
from bapo_megatron.sandbox.base import SandboxError
from tests.reward import own_functions
from tests.reward.scoring import score_in_turn

OWN = "tests.reward.own_functions"
RAISES = own_functions.raises.__code__.co_firstlineno + 1
"""Line of its error."""
RESPONSE = Response(
    "some text",
    "42",
    SampleFacts("train:7", "gsm8k", "What?", "length", num_tokens=12),
    {"level": 3},
)
NAMES = (
    "slow_length",
    "everything",
    "a_score",
    "a_score_of_numpy",
    "raises",
    "exits",
    "not_finite",
    "no_number",
    "no_reward",
    "length",
)


@pytest.fixture(scope="module")
def outcomes():
    """What each function gives, twice, from one worker that has them all."""

    async def ask():
        outcomes = {}
        functions = tuple(f"{OWN}:{name}" for name in NAMES)
        async with RewardPool(workers=1, timeout_s=10, functions=functions) as pool:
            await pool.start()
            [worker] = pool._workers._running
            for name in (*NAMES, *NAMES):
                try:
                    outcomes[name] = await pool.score(RESPONSE, function=f"{OWN}:{name}")
                except RewardError as error:
                    outcomes[name] = error
            assert list(pool._workers._running) == [worker]
        return outcomes

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("name", "score"),
    [
        ("length", Score(reward=9.0)),
        ("slow_length", Score(reward=11.0)),
        (
            "everything",
            Score(
                reward=0.25,
                reason="some text 42 train:7 gsm8k What?",
                extracted="length True",
                metrics={"level": 3.0, "tokens": 12.0},
            ),
        ),
        ("a_score", Score(0.5, answer_found=False, extracted="some text", metrics={"seen": 1.0})),
        ("a_score_of_numpy", Score(0.5, answer_found=False, extracted="5", metrics={"seen": 1.0})),
    ],
)
def test_a_function_gets_what_its_parameters_name_and_may_return_any_kind(outcomes, name, score):
    assert outcomes[name] == score


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", rf"RuntimeError: cannot score .* \(/.*/own_functions\.py:{RAISES}\)"),
        ("exits", r"SystemExit: 0 \(/.*/own_functions\.py:\d+\)"),
        ("not_finite", "ValueError: 'reward' must be finite"),
        ("no_number", "ValueError: 'reward' must be a number"),
        ("no_reward", "ValueError: .* without 'reward'"),
    ],
)
def test_a_function_that_fails_is_named_with_its_reason(outcomes, name, message):
    assert isinstance(outcomes[name], FunctionFailedError)
    assert re.search(f"{name}' failed: {message}", str(outcomes[name]))


def test_the_first_traceback_of_a_line_that_fails_is_written_for_the_log(capfd):
    async def fail_twice():
        async with RewardPool(1, 10, (f"{OWN}:raises",)) as pool:
            for _ in range(2):
                with pytest.raises(FunctionFailedError):
                    await pool.score("x")

    asyncio.run(fail_twice())
    written = capfd.readouterr().err
    assert written.count(f'own_functions.py", line {RAISES}, in raises') == 1
    assert written.count("RuntimeError: cannot\nscore x") == 1


def test_a_function_that_ends_its_process_has_failed_and_not_timed_out():
    with pytest.raises(FunctionFailedError, match="_process' failed: it ended two processes"):
        score_in_turn(RESPONSE, function=f"{OWN}:end_the_process")


def test_the_built_in_function_scores_zero_by_a_reason_of_its_own_where_it_crashes(monkeypatch):
    async def ask():
        async with RewardPool(1, 10) as pool:
            monkeypatch.setattr(pool._workers, "ask", died)
            return await pool.score("1", "1")

    async def died(request):
        return Outcome("died")

    assert asyncio.run(ask()) == Score(reward=0.0, answer_found=False, failed=True, reason="crash")


def test_a_function_that_exceeds_its_memory_scores_zero():
    async def ask():
        functions = (f"{OWN}:eat_memory", f"{OWN}:length")
        async with RewardPool(1, timeout_s=1, functions=functions) as pool:
            score = await pool.score(RESPONSE)
            return score, await pool.score(RESPONSE, function=f"{OWN}:length")

    score, after = asyncio.run(ask())

    assert score == Score(reward=0.0, answer_found=False, timed_out=True, reason="limit")
    assert after.reward == 9.0


@pytest.mark.parametrize(
    ("result", "score"),
    [
        (True, Score(1.0)),
        (0, Score(0.0)),
        (-0.5, Score(-0.5)),
        ({"reward": 2}, Score(2.0)),
        ({"reward": 0.5, "extracted": "5"}, Score(0.5, extracted="5")),
        # An empty answer was not found, unless the function says so.
        ({"reward": 0.5, "extracted": ""}, Score(0.5, answer_found=False)),
        ({"reward": 0.5, "extracted": "", "answer_found": True}, Score(0.5)),
        ({"reward": 0.5, "answer_found": False}, Score(0.5, answer_found=False)),
    ],
)
def test_numbers_and_mappings_are_rewards(result, score):
    assert as_score(result) == score


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "'reward' .* got NoneType"),
        ([1.0], "'reward' .* got list"),
        (float("inf"), "'reward' must be finite"),
        ({"score": 1.0}, "without 'reward'"),
        ({}, "without 'reward'"),
        ({"reward": 1, "note": "fine"}, "'note' .* got str"),
        ({"reward": 1, "a/b": 1}, "'a/b'"),
        ({"reward": 1, **{f"m{n}": n for n in range(33)}}, "33 metrics"),
        (Score(float("nan")), "'reward' must be finite"),
    ],
)
def test_what_is_no_reward_is_refused(result, message):
    with pytest.raises(ValueError, match=message):
        as_score(result)


def answer(name, *texts, rewards=None):
    """What a worker answers for responses to one prompt."""
    responses = [{"text": text, "sample": {}, "turns": (), "state": None} for text in texts]
    request = {"answer": "42", "row": {"size": 3}, "rewards": rewards, "responses": responses}
    return build({}, name).answer({"function": name, **request})


@pytest.mark.parametrize(
    ("name", "texts", "rewards", "message"),
    [
        ("OfGroups.one_too_few", "ab", [0, 0], "each of 2 responses, got 1$"),
        ("OfGroups.one_number", "ab", [0, 0], "each of 2 responses, got float$"),
        ("one_text", "abc", [0, 0, 0], "each of 3 responses, got str$"),
        ("OfGroups.words", "ab", [0, 0], "'reward' must be a number"),
        ("OfGroups.rank", "a", None, "^it asks for responses, answer, row: .* whole groups"),
    ],
)
def test_a_group_function_needs_a_group_and_returns_one_reward_each(name, texts, rewards, message):
    with pytest.raises(ValueError, match=message):
        answer(f"{OWN}:{name}", *texts, rewards=rewards)


@pytest.mark.parametrize(
    ("pattern", "text", "is_found"),
    [
        (None, r"so \boxed{2}", True),
        (None, r"so \boxed{}", False),
        (None, r"so \boxed{2", False),
        (r"\d+$", "a1", True),
        (r"\d+$", "1a", False),
    ],
)
def test_a_format_is_a_closed_box_or_a_match_anywhere(pattern, text, is_found):
    assert build({}).answer({"pattern": pattern, "text": text}) is is_found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "has no 'missing'"),
        ("NOT_CALLABLE", "must name a function, got int"),
        ("wrong_parameter", "asks for 'completion', but is called with response, answer, sample"),
        ("by_position", "asks for 'response', but is called with response, answer, sample"),
        ("OfGroups.mixed", "asks for 'turns' of one response and for 'responses' of a group"),
        ("OfGroups.unknown", "asks for 'question', but is called with responses, samples, states"),
        ("OfGroups.not_static", "asks for 'self', but is called with responses, samples, states"),
        ("dict", "cannot be read"),
    ],
)
def test_a_function_that_cannot_be_called_is_named_with_the_reason(name, message):
    function = f"builtins:{name}" if name == "dict" else f"{OWN}:{name}"
    with pytest.raises(LoadError, match=f"^reward function '{function}' .*{message}"):
        build({}, function)


def test_the_built_in_functions_are_those_of_the_configuration():
    assert (*BUILT_IN, "program", "gym") == BUILT_IN_FUNCTIONS
    assert set(BUILT_IN_FUNCTIONS) == GRADERS


def answered(name, outcome):
    """The reply for a response to which the function ``name`` returns or raises ``outcome``."""

    def function(response):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    handler = RewardHandler({name: LoadedFunction(function, ("response",), sees_groups=False)})
    response = {"text": "1", "sample": {}, "turns": (), "state": None}
    request = {"function": name, "answer": "1", "row": {}, "rewards": None}
    return handler.answer({**request, "responses": [response]})


@pytest.mark.parametrize("name", BUILT_IN_FUNCTIONS)
@pytest.mark.parametrize("outcome", [RecursionError("deep"), KeyError(1), float("nan"), "right"])
def test_a_built_in_function_that_fails_on_a_response_scores_0_and_is_counted(name, outcome):
    [score] = answered(name, outcome)

    found = score["reward"], score["reason"], score["failed"], score["answer_found"]
    assert found == (0.0, "error", True, False)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("my_rewards:grade", RecursionError("deep")),
        ("math", MemoryError()),
        ("program", SandboxError("lost")),
        ("gym", RowError("no gym")),
    ],
)
def test_other_failures_are_errors(name, error):
    with pytest.raises(type(error)):
        answered(name, error)
