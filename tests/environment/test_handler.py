"""What a worker of an environment refuses; ``test_in_workers`` has the way to it and back."""

import pytest

from bapo_megatron.environment.handler import build
from bapo_megatron.runtime.names import LoadError

OWN = "tests.environment.own_environments"


def answer(name, **request):
    return build(f"{OWN}:{name}").answer(request)


def turn_of(text="", token_ids=()):
    fields = {"number": 0, "text": text, "token_ids": list(token_ids), "remaining_tokens": 100}
    return {**fields, "calls": []}


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
        {},
    ]


def test_methods_may_be_coroutines_and_write_exact_tokens():
    assert answer("Tokens", task=task_of()) is None
    step = answer("Tokens", state=None, turn=turn_of(token_ids=(5, 6)))
    assert step == [100, [], [6, 5], False, {}]


def test_an_array_of_token_ids_is_a_list_of_them():
    assert answer("Bad", state=None, turn=turn_of("array")) == [1, [], [5, 6], False, {}]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a_dictionary", "step must .* got dict"),
        ("set_as_state", "the state must be a JSON value"),
        ("nan_as_state", "the state must be a JSON value"),
        ("large_state", "the state must .* got 1,000,002 bytes"),
        ("deep_state", "the state must .* nested 101 deep"),
        ("bottomless_state", "the state must be a JSON value"),
        ("message_without_content", "must hold messages with role and content"),
        ("message_of_numbers", "must hold messages with role and content"),
        ("message_of_half_a_pair", "'utf-8' codec .* surrogates not allowed"),
        ("message_as_text", "must hold messages with role and content"),
        ("messages_as_text", "'messages' must be a list"),
        ("texts_as_tokens", r"'token_ids\[0\]' must be an integer, got '5'"),
        ("fractions_as_tokens", r"'token_ids\[1\]' must be an integer, got 5\.5"),
        ("negative_tokens", r"'token_ids\[0\]' must .* 0, got -1"),
        ("number_as_tokens", "'token_ids' must be a list, got 5"),
        ("truth_as_tokens", r"'token_ids\[0\]' must be an integer, got true"),
        ("nothing", "a step must do one of three things"),
        ("both", "a step must do one of three things"),
        ("done_and_more", "a step must do one of three things"),
        ("done_in_words", "'is_done' must be a boolean, got 'yes'"),
    ],
)
def test_a_step_that_breaks_a_rule_is_refused(text, place):
    with pytest.raises(ValueError, match=f"^{place}"):
        answer("Bad", state=None, turn=turn_of(text))


def test_a_first_state_must_be_json():
    with pytest.raises(ValueError, match="the state must be a JSON value"):
        answer("Bad", task=task_of("a_set"))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Missing", f"module {OWN} has no 'Missing'"),
        ("NOT_A_CLASS", "must name a class, got int"),
        ("WithoutStep", r"must have a method step\(state, turn\): "),
        ("StepOfOne", r"must have a method step\(state, turn\): too many"),
        ("WithArguments", "must be created without arguments: .* 'path'; correct it"),
        ("Boundless", "must be created .* MemoryError:; raise rollout.episodes.memory_limit_mb"),
    ],
)
def test_a_class_that_cannot_be_used_is_named_with_the_reason(name, problem):
    with pytest.raises(LoadError, match=f"^'{OWN}:{name}' {problem}"):
        build(f"{OWN}:{name}")
