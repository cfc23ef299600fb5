"""What a worker of an environment refuses; ``test_in_workers`` has the way to it and back."""

from __future__ import annotations

import re

import pytest

from bapo_megatron.environment.handler import build
from bapo_megatron.runtime.names import LoadError

OWN = "tests.environment.own_environments"


def answer(name, **request):
    return build(f"{OWN}:{name}").answer(request)


def turn_of(text="", token_ids=()):
    return {"number": 0, "text": text, "token_ids": list(token_ids), "remaining_tokens": 100}


def task_of(answer="", **row):
    return {"prompt_id": "p:1", "source": "set", "prompt": "What?", "answer": answer, "row": row}


def test_a_task_gives_the_first_state_and_a_turn_the_fields_of_a_step():
    state = answer("Countdown", task={**task_of(turns=2), "seed": 7})

    assert state == {"left": 2, "seed": 7, "heard": ()}
    assert answer("Countdown", state=state, turn=turn_of("a")) == [
        {"left": 1, "seed": 7, "heard": ["a"]},
        [{"role": "user", "content": "1 left"}],
        [],
        False,
    ]


def test_methods_may_be_coroutines_and_write_exact_tokens():
    assert answer("Tokens", task=task_of()) is None
    assert answer("Tokens", state=None, turn=turn_of(token_ids=(5, 6))) == [100, [], [6, 5], False]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a_dictionary", "step must return a Step, got dict"),
        ("set_as_state", "the state must be a JSON value (Object of type set is not JSON serial"),
        ("nan_as_state", "the state must be a JSON value (Out of range float values"),
        ("large_state", "the state must be at most 1,000,000 bytes of JSON, got 1,000,002"),
        ("deep_state", "the state must be nested at most 100 deep, got 101"),
        ("bottomless_state", "the state must be a JSON value (maximum recursion depth"),
        ("message_without_content", "a message must have 'content', got ['role']"),
        ("message_of_numbers", "a message must hold strings, got int as 'content'"),
        ("message_of_half_a_pair", r"a message must be UTF-8, got '\ud800' as 'content'"),
        ("message_as_text", "a message must be a mapping with role and content, got str"),
        ("messages_as_text", "messages must be a list, got str"),
        ("texts_as_tokens", "token_ids must be integers from 0, got '5'"),
        ("fractions_as_tokens", "token_ids must be integers from 0, got 5.5"),
        ("negative_tokens", "token_ids must be integers from 0, got -1"),
        ("number_as_tokens", "token_ids must be a list, got int"),
        ("truth_as_tokens", "token_ids must be integers from 0, got True"),
        ("nothing", "a step that is not done must write messages or token_ids, got neither"),
        ("both", "a step writes either messages or token_ids, got both"),
        ("done_and_more", "a step that is done writes nothing, got messages or token_ids"),
        ("done_in_words", "is_done must be true or false, got 'yes'"),
        ("much", "a step writes at most 500,000 bytes of JSON, got 4,000,"),
    ],
)
def test_a_step_that_breaks_a_rule_is_refused(text, reason):
    with pytest.raises(ValueError, match="^" + re.escape(reason)):
        answer("Bad", state=None, turn=turn_of(text))


def test_a_first_state_must_be_json():
    with pytest.raises(
        ValueError, match=r"^the state must be a JSON value \(Object of type set is"
    ):
        answer("Bad", task=task_of("a_set"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Missing", f"module {OWN} has no 'Missing'; name one of its classes"),
        ("NOT_A_CLASS", "must name a class, got int; name a class"),
        ("WithoutStep", "must have a method step(state, turn); add it"),
        (
            "StepOfOne",
            "must be callable as step(state, turn): too many positional arguments; correct the "
            "method",
        ),
        (
            "WithArguments",
            "must be a class that is made without arguments: TypeError: WithArguments.__init__() "
            "missing 1 required positional argument: 'path'; correct it",
        ),
        (
            "Boundless",
            "needs more memory than it may have; raise rollout.episodes.memory_limit_mb",
        ),
    ],
)
def test_a_class_that_cannot_be_used_is_named_with_the_reason(name, message):
    with pytest.raises(LoadError) as raised:
        build(f"{OWN}:{name}")
    assert str(raised.value) == f"'{OWN}:{name}' {message}"
