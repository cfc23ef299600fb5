"""What a worker of an environment refuses; ``test_load`` has the way to it and back."""

from types import SimpleNamespace

import numpy as np
import pytest

from bapo_megatron.environment.base import Step
from bapo_megatron.environment.handler import EnvironmentHandler, build
from bapo_megatron.runtime.names import LoadError
from tests.environment.own_environments import Countdown, Tokens, nested

OWN = "tests.environment.own_environments"


def answer(environment, **request):
    return EnvironmentHandler("own", environment).answer(request)


def turn_of(text="", token_ids=()):
    fields = {"number": 0, "text": text, "token_ids": list(token_ids), "remaining_tokens": 100}
    return {**fields, "calls": []}


def task_of(**row):
    return {"prompt_id": "p:1", "source": "set", "prompt": "What?", "answer": "", "row": row}


def test_a_task_gives_the_first_state_and_a_turn_the_fields_of_a_step():
    state = answer(Countdown(), task={**task_of(turns=2), "seed": 7})

    assert state == {"left": 2, "seed": 7, "heard": ()}
    assert answer(Countdown(), state=state, turn=turn_of("a")) == [
        {"left": 1, "seed": 7, "heard": ["a"]},
        [{"role": "user", "content": "1 left"}],
        [],
        False,
        {},
    ]


def test_methods_may_be_coroutines_and_write_exact_tokens():
    assert answer(Tokens(), task=task_of()) is None
    step = answer(Tokens(), state=None, turn=turn_of(token_ids=(5, 6)))
    assert step == [100, [], [6, 5], False, {}]


def answer_with(**fields):
    """The answer to a turn after which the environment returns a step of these fields."""
    step = Step(**{"state": 1, **fields})
    environment = SimpleNamespace(step=lambda state, turn: step)
    return answer(environment, state=None, turn=turn_of())


def test_an_array_of_token_ids_is_a_list_of_them():
    assert answer_with(token_ids=np.array([5, 6])) == [1, [], [5, 6], False, {}]


def in_lists(depth, inner):
    return nested(inner, depth, lambda inner: [inner])


STATE = "the state must be a JSON value"
MESSAGE = "must hold messages with role and content"
ONE_THING = "a step must do one of three things"
ASKS = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"state": {1, 2}, "is_done": True}, STATE),
        ({"state": float("nan"), "is_done": True}, STATE),
        ({"state": "x" * 1_000_000, "is_done": True}, "the state must .* got 1,000,002 bytes"),
        ({"state": in_lists(101, "[]]" * 200), "is_done": True}, "the state must .* 101 deep"),
        ({"state": in_lists(100_000, []), "is_done": True}, STATE),
        ({"messages": [{"role": "user"}]}, MESSAGE),
        ({"messages": [{"role": "user", "content": 5}]}, MESSAGE),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "'utf-8' codec .* surrogates"),
        ({"messages": ["hello"]}, MESSAGE),
        ({"messages": "hello"}, "'messages' must be a list"),
        ({"token_ids": ["5"]}, r"'token_ids\[0\]' must be an integer, got '5'"),
        ({"token_ids": [5, 5.5]}, r"'token_ids\[1\]' must be an integer, got 5\.5"),
        ({"token_ids": [-1]}, r"'token_ids\[0\]' must .* 0, got -1"),
        ({"token_ids": 5}, "'token_ids' must be a list, got 5"),
        ({"token_ids": [True]}, r"'token_ids\[0\]' must be an integer, got true"),
        ({}, ONE_THING),
        ({"messages": ASKS, "token_ids": [1]}, ONE_THING),
        ({"token_ids": [1], "is_done": True}, ONE_THING),
        ({"is_done": "yes"}, "'is_done' must be a boolean, got 'yes'"),
    ],
)
def test_a_step_that_breaks_a_rule_is_refused(fields, place):
    with pytest.raises(ValueError, match=f"^{place}"):
        answer_with(**fields)


def test_a_first_state_must_be_json():
    environment = SimpleNamespace(start=lambda task: {1, 2})
    with pytest.raises(ValueError, match=STATE):
        answer(environment, task=task_of())


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (f"{OWN}:Missing", f"module {OWN} has no 'Missing'"),
        ("json:loads", "must name a class, got function"),
        (f"{OWN}:WithoutStep", r"must have a method step\(state, turn\): "),
        (f"{OWN}:StepOfOne", r"must have a method step\(state, turn\): too many"),
        ("datetime:date", "must be created without arguments: TypeError: .*; correct it"),
        (f"{OWN}:Boundless", "must be created .* MemoryError:; raise rollout.episodes.memory"),
    ],
)
def test_a_class_that_cannot_be_used_is_named_with_the_reason(name, problem):
    with pytest.raises(LoadError, match=f"^'{name}' {problem}"):
        build(name)
