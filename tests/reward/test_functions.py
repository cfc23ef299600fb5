from __future__ import annotations

import asyncio

import pytest

from bapo_megatron.config.reward import BUILT_IN_FUNCTIONS
from bapo_megatron.reward.base import (
    FunctionFailedError,
    Response,
    RewardError,
    SampleFacts,
    Score,
)
from bapo_megatron.reward.functions import BUILT_IN, as_score, build
from bapo_megatron.reward.pool import RewardPool
from bapo_megatron.runtime.names import LoadError
from bapo_megatron.runtime.workers import Outcome
from tests.reward import own_functions

OWN = "tests.reward.own_functions"
RAISES = own_functions.raises.__code__.co_firstlineno + 1
"""Line of its error."""
GIVEN = Response(
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
        found = {}
        functions = tuple(f"{OWN}:{name}" for name in NAMES)
        async with RewardPool(workers=1, timeout_s=10, functions=functions) as pool:
            await pool.start()
            [worker] = pool._workers._running
            for name in (*NAMES, *NAMES):
                try:
                    found[name] = await pool.score(GIVEN, function=f"{OWN}:{name}")
                except RewardError as error:
                    found[name] = error
            assert list(pool._workers._running) == [worker]
        return found

    return asyncio.run(ask())


def test_a_function_gets_what_its_parameters_name_and_may_return_a_number(outcomes):
    assert outcomes["length"] == Score(reward=9.0)


def test_a_coroutine_is_awaited_in_one_loop_for_all_answers(outcomes):
    assert outcomes["slow_length"] == Score(reward=11.0)


def test_a_function_gets_the_sample_and_the_row_and_may_return_metrics(outcomes):
    assert outcomes["everything"] == Score(
        reward=0.25,
        reason="some text 42 train:7 gsm8k What?",
        extracted="length True",
        metrics={"level": 3.0, "tokens": 12.0},
    )


def test_a_function_may_return_a_score(outcomes):
    assert outcomes["a_score"] == Score(
        reward=0.5, answer_found=False, extracted="some text", metrics={"seen": 1.0}
    )


def test_a_score_may_hold_numbers_of_numpy(outcomes):
    assert outcomes["a_score_of_numpy"] == Score(
        reward=0.5, answer_found=False, extracted="5", metrics={"seen": 1.0}
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "raises",
            rf"RuntimeError: cannot score .* \(/.*/own_functions\.py:{RAISES}\); correct it$",
        ),
        ("exits", r"failed: SystemExit: 0 \(/.*/own_functions\.py:\d+\); correct it$"),
        ("not_finite", "failed: ValueError: 'reward' must be finite, got nan"),
        ("no_number", "failed: ValueError: 'reward' must be a number, got str"),
        ("no_reward", r"failed: ValueError: it returned a mapping without 'reward' \(keys: score"),
    ],
)
def test_a_function_that_fails_is_named_with_its_reason(outcomes, name, message):
    assert isinstance(outcomes[name], FunctionFailedError)
    with pytest.raises(FunctionFailedError, match=message):
        raise outcomes[name]


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
    async def ask():
        async with RewardPool(1, 10, (f"{OWN}:end_the_process",)) as pool:
            await pool.score(GIVEN)

    with pytest.raises(FunctionFailedError, match="_process' failed: it ended two processes"):
        asyncio.run(ask())


def test_the_built_in_function_scores_zero_by_a_reason_of_its_own_where_it_crashes(monkeypatch):
    async def ask():
        async with RewardPool(1, 10) as pool:
            monkeypatch.setattr(pool._workers, "ask", died)
            return await pool.score("1", "1")

    async def died(request):
        return Outcome("died")

    assert asyncio.run(ask()) == Score(reward=0.0, answer_found=False, failed=True, reason="crash")


@pytest.mark.parametrize("name", ["hang", "eat_memory"])
def test_a_function_that_exceeds_a_limit_scores_zero(name):
    async def ask():
        functions = (f"{OWN}:{name}", f"{OWN}:length")
        async with RewardPool(1, timeout_s=1, functions=functions) as pool:
            score = await pool.score(GIVEN)
            return score, await pool.score(GIVEN, function=f"{OWN}:length")

    score, after = asyncio.run(ask())

    assert score == Score(reward=0.0, answer_found=False, timed_out=True, reason="limit")
    assert after.reward == 9.0


@pytest.mark.parametrize(
    ("result", "reward"), [(True, 1.0), (0, 0.0), (-0.5, -0.5), ({"reward": 2}, 2.0)]
)
def test_numbers_of_every_kind_are_rewards(result, reward):
    assert as_score(result) == Score(reward=reward)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "must be a number, got NoneType"),
        ([1.0], "must be a number, got list"),
        (float("inf"), "must be finite"),
        ({"score": 1.0}, r"returned a mapping without 'reward' \(keys: score\); add it"),
        ({}, r"returned a mapping without 'reward' \(keys: none\); add it"),
        ({"reward": 1, "note": "fine"}, "'note' must be a number, got str"),
        ({"reward": 1, "a/b": 1}, "metric names must be letters"),
        ({"reward": 1, **{f"m{n}": n for n in range(33)}}, "returned 33 metrics, at most 32"),
        (Score(float("nan")), "must be finite"),
    ],
)
def test_what_is_no_reward_is_refused(result, message):
    with pytest.raises(ValueError, match=message):
        as_score(result)


def answer(name, *texts, rewards=None):
    """What a worker answers for responses to one prompt."""
    responses = [{"text": text, "sample": {}, "turns": (), "state": None} for text in texts]
    request = {"answer": "42", "row": {"size": 3}, "rewards": rewards, "responses": responses}
    return build(name).answer({"function": name, **request})


def test_a_group_function_gives_a_score_for_each_response():
    scores = answer(f"{OWN}:OfGroups.rank", "four", "x", rewards=[0.0, 0.0])

    assert [(score["reward"], score["metrics"]) for score in scores] == [
        (1.0, {"size": 3.0}),
        (0.0, {"size": 3.0}),
    ]


@pytest.mark.parametrize(
    ("name", "texts", "rewards", "message"),
    [
        ("OfGroups.one_too_few", "ab", [0, 0], "one reward for each of 2 responses, got 1$"),
        ("OfGroups.one_number", "ab", [0, 0], "list with one reward for each response, got float$"),
        ("one_text", "abc", [0, 0, 0], "list with one reward for each response, got str$"),
        (
            "OfGroups.rank",
            "a",
            None,
            "^it asks for responses, answer, row: it scores a whole group of responses, and was "
            "given one$",
        ),
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
    assert build().answer({"pattern": pattern, "text": text}) is is_found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{OWN}:missing", f"module {OWN} has no 'missing'; name one of its functions"),
        (f"{OWN}:NOT_CALLABLE", "must name a function, got int; name a function of the module"),
        (
            f"{OWN}:wrong_parameter",
            "asks for 'completion', but is called with response, answer, sample, row, turns, state "
            "by name; rename the parameter, or give it a default",
        ),
        (
            f"{OWN}:by_position",
            "asks for 'response', but is called with response, answer, sample, row, turns, state "
            "by name; rename the parameter, or give it a default",
        ),
        (
            f"{OWN}:OfGroups.mixed",
            "asks for 'turns' of one response and for 'responses' of a group; ask for one kind, "
            "and write two functions if you need both",
        ),
        (
            f"{OWN}:OfGroups.unknown",
            "asks for 'question', but is called with responses, samples, states, rewards, answer, "
            "row by name; rename the parameter, or give it a default",
        ),
        (
            f"{OWN}:OfGroups.not_static",
            "asks for 'self', but is called with responses, samples, states, rewards, answer, row "
            "by name; rename the parameter, or give it a default",
        ),
        (
            "builtins:dict",
            "its parameters cannot be read (no signature found for builtin type <class 'dict'>); "
            "write it in Python",
        ),
    ],
)
def test_a_function_that_cannot_be_called_is_named_with_the_reason(name, message):
    with pytest.raises(LoadError) as raised:
        build(name)
    assert str(raised.value) == f"reward function '{name}' {message}"


def test_the_built_in_functions_are_those_of_the_configuration():
    assert tuple(BUILT_IN) == BUILT_IN_FUNCTIONS
