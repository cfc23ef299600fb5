from __future__ import annotations

import pytest

from bapo_megatron.config.rollout import EpisodesConfig
from bapo_megatron.environment.base import Step, Task
from bapo_megatron.environment.in_workers import WorkerEnvironment
from bapo_megatron.environment.load import SingleTurn, load_environment


def load(name):
    return load_environment(name, EpisodesConfig(workers=1, step_timeout_s=1, memory_limit_mb=512))


def run_without_a_loop(coroutine):
    """The result of a coroutine that never waits for anything."""
    with pytest.raises(StopIteration) as returned:
        coroutine.send(None)
    return returned.value.value


def never_asked_for():
    raise AssertionError("decoding a turn that nobody reads costs time")


def test_it_ends_after_one_turn_and_never_waits():
    environment = load("single_turn")

    assert isinstance(environment, SingleTurn)
    run_without_a_loop(environment.open())
    assert run_without_a_loop(environment.start(Task("p:1", "set", "What?", "4"))) is None
    step = run_without_a_loop(environment.step(None, never_asked_for))
    assert step == Step(None, messages=(), token_ids=(), is_done=True)
    run_without_a_loop(environment.close())


def test_another_name_is_a_class_in_processes_that_may_write():
    environment = load("tests.environment.own_environments:Countdown")

    assert isinstance(environment, WorkerEnvironment)
