import json
from dataclasses import asdict

import numpy as np
import pytest

from bapo_megatron.config.reward import BUILT_IN_FUNCTIONS
from bapo_megatron.reward.base import (
    FunctionFailedError,
    Response,
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
from bapo_megatron.reward.math_answer import grade_math_answer
from bapo_megatron.reward.math_verify_grader import grade_by_math_verify
from bapo_megatron.reward.pool import RewardPool
from bapo_megatron.runtime.names import LoadError
from bapo_megatron.runtime.workers import Outcome
from bapo_megatron.sandbox.base import SandboxError
from tests.reward import own_functions

OWN = "tests.reward.own_functions"
RAISES = own_functions.raises.__code__.co_firstlineno + 1
"""Line of its error."""
RESPONSE = Response(
    "some text",
    "42",
    SampleFacts("train:7", "gsm8k", "What?", "length", num_tokens=12),
    {"level": 3},
)


async def test_one_worker_runs_all_functions_and_goes_on_after_those_that_fail():
    failures = {
        "raises": rf"RuntimeError: cannot score .* \(/.*/own_functions\.py:{RAISES}\)",
        "exits": r"SystemExit: 0 \(/.*/own_functions\.py:\d+\)",
    }
    scores = {
        "length": Score(reward=9.0),
        "slow_length": Score(reward=11.0),
        "everything": Score(
            reward=0.25,
            reason="some text 42 train:7 gsm8k What?",
            extracted="length True",
            metrics={"level": 3.0, "tokens": 12.0},
        ),
    }
    functions = {name: f"{OWN}:{name}" for name in (*failures, *scores)}
    async with RewardPool(1, 10, tuple(functions.values())) as pool:
        await pool.start()
        [worker] = pool._workers._running
        for _ in range(2):
            for name, message in failures.items():
                with pytest.raises(FunctionFailedError, match=f"{name}' failed: {message}"):
                    await pool.score(RESPONSE, function=functions[name])
            for name, score in scores.items():
                assert await pool.score(RESPONSE, function=functions[name]) == score
        assert list(pool._workers._running) == [worker]


async def test_the_first_traceback_of_a_line_that_fails_is_written_for_the_log(capfd):
    async with RewardPool(1, 10, (f"{OWN}:raises",)) as pool:
        for _ in range(2):
            with pytest.raises(FunctionFailedError):
                await pool.score("x")

    written = capfd.readouterr().err
    assert written.count(f'own_functions.py", line {RAISES}, in raises') == 1
    assert written.count("RuntimeError: cannot\nscore x") == 1


async def test_the_built_in_function_scores_zero_by_a_reason_of_its_own_where_it_crashes(
    monkeypatch,
):
    async def died(request):
        return Outcome("died")

    pool = RewardPool(1, 10)
    monkeypatch.setattr(pool._workers, "ask", died)
    crashed = Score(reward=0.0, answer_found=False, failed=True, reason="crash")
    assert await pool.score("1", "1") == crashed


async def test_a_function_that_exceeds_its_memory_scores_zero():
    functions = (f"{OWN}:eat_memory", f"{OWN}:length")
    async with RewardPool(1, timeout_s=1, functions=functions) as pool:
        limited = Score(reward=0.0, answer_found=False, timed_out=True, reason="limit")
        assert await pool.score(RESPONSE) == limited
        assert (await pool.score(RESPONSE, function=functions[1])).reward == 9.0


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
        (
            Score(np.float32(0.5), np.bool_(False), np.str_("5"), metrics={"seen": np.int64(1)}),
            Score(0.5, answer_found=False, extracted="5", metrics={"seen": 1.0}),
        ),
    ],
)
def test_numbers_mappings_and_scores_are_rewards_that_json_can_hold(result, score):
    assert json.dumps(asdict(as_score(result))) == json.dumps(asdict(score))


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


def answer(function, *texts, name="mine:reward", parameters=("responses", "row"), rewards=None):
    """What a worker answers for responses to one prompt."""
    loaded = LoadedFunction(function, parameters, sees_groups="responses" in parameters)
    responses = [{"text": text, "sample": {}, "turns": (), "state": None} for text in texts]
    request = {"answer": "1", "row": {}, "rewards": rewards, "responses": responses}
    return RewardHandler({name: loaded}).answer({"function": name, **request})


@pytest.mark.parametrize(
    ("result", "rewards", "message"),
    [
        ([0.0], [0, 0], "each of 2 responses, got 1$"),
        (1.0, [0, 0], "each of 2 responses, got float$"),
        ("no", [0, 0], "each of 2 responses, got str$"),
        (["good", "bad"], [0, 0], "'reward' must be a number"),
        ([0.0], None, "^it asks for responses, row: .* whole groups of responses, got one$"),
    ],
)
def test_a_group_function_needs_a_group_and_returns_one_reward_each(result, rewards, message):
    with pytest.raises(ValueError, match=message):
        answer(lambda responses, row: result, "a", "b", rewards=rewards)


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
    graders = [loaded.function for loaded in build({}, *BUILT_IN)._functions.values()]
    assert graders == [grade_math_answer, grade_by_math_verify]


def answered(name, outcome):
    """The reply for a response to which the function ``name`` returns or raises ``outcome``."""

    def function(response):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return answer(function, "1", name=name, parameters=("response",))


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
