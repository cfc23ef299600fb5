from __future__ import annotations

import asyncio
import re
import subprocess
import sys

import pytest

from bapo_megatron.config.rollout import EpisodesConfig, RolloutConfig
from bapo_megatron.environment.base import EnvironmentFailedError, Step, Task, Turn
from bapo_megatron.environment.load import SingleTurn, WorkerEnvironment, load_environment
from bapo_megatron.errors import RolloutError

OWN = "tests.environment.own_environments"
RETURNED = {
    "a_dictionary": "ValueError: step must return a Step",
    "raises": "RuntimeError: cannot step",
}


def task_of(answer="", **row):
    return Task("set:7", "set", "What?", answer, row, seed=11)


def turn_of(text="", number=0, token_ids=()):
    return lambda: Turn(number, text, token_ids, remaining_tokens=100, prompt_id="set:7")


def run(name, use, *, workers=1, step_timeout_s=20.0, memory_limit_mb=512):
    """What ``use`` returns for an environment, which is opened before it and closed after it."""

    async def main():
        limits = EpisodesConfig(
            workers=workers, step_timeout_s=step_timeout_s, memory_limit_mb=memory_limit_mb
        )
        environment = load_environment(RolloutConfig(environment=f"{OWN}:{name}", episodes=limits))
        assert isinstance(environment, WorkerEnvironment)
        try:
            await environment.open()
            return await use(environment)
        finally:
            await environment.close()

    return asyncio.run(main())


@pytest.mark.parametrize("name", ["Countdown", "Outer.Inner"])
def test_episodes_run_side_by_side_and_their_states_travel_between_processes(name):
    async def episode(environment, number):
        state = await environment.start(task_of(turns=3))
        said = []
        for turn in range(3):
            step = await environment.step(state, turn_of(f"{number}.{turn}", turn))
            state = step.state
            said += [message["content"] for message in step.messages]
        return said, step

    async def use(environment):
        return await asyncio.gather(*(episode(environment, number) for number in range(4)))

    for number, (said, step) in enumerate(run(name, use, workers=2)):
        assert said == ["2 left", "1 left"]
        heard = [f"{number}.0", f"{number}.1", f"{number}.2"]
        assert step == Step({"left": 0, "seed": 11, "heard": heard}, [], (), is_done=True)


@pytest.fixture(scope="module")
def returned():
    """What becomes of each return value, from one process."""

    async def use(environment):
        outcomes = {}
        for text in (*RETURNED, "deepest_state", "fine"):
            try:
                outcomes[text] = await environment.step(None, turn_of(text, number=2))
            except EnvironmentFailedError as error:
                outcomes[text] = error
        return outcomes

    return run("Bad", use)


@pytest.mark.parametrize(("text", "reason"), RETURNED.items())
def test_an_error_and_a_wrong_value_are_one_line_with_place_and_remedy(returned, text, reason):
    error = returned[text]
    assert (type(error), error.kind) == (EnvironmentFailedError, "error")
    place = r"\(prompt 'set:7', turn 2\); correct it, or set rollout\.episodes\.on_error=zero"
    assert re.fullmatch(
        rf"rollout\.environment: {OWN}:Bad\.step failed: {reason}.* {place}", str(error)
    )


def test_a_process_goes_on_after_wrong_values(returned):
    assert returned["fine"] == Step(1, [], (), is_done=True)
    assert returned["deepest_state"].is_done


def fail(name="Bad", *, call, then=None, **limits):
    """The error of a call, and a fine step after it."""

    async def use(environment):
        with pytest.raises(EnvironmentFailedError) as raised:
            await call(environment)
        return raised.value, await environment.step(None, turn_of("fine"))

    return run(name, use, **limits)


@pytest.mark.slow
def test_a_step_that_hangs_is_ended_at_the_limit_while_others_go_on():
    async def use(environment):
        both = [environment.step(None, turn_of("fine")) for _ in range(2)]
        await asyncio.gather(*both)  # both processes are up now
        hanging = asyncio.create_task(environment.step(None, turn_of("hang")))
        others = [await environment.step(None, turn_of("fine")) for _ in range(3)]
        assert not hanging.done()
        with pytest.raises(EnvironmentFailedError) as raised:
            await hanging
        return raised.value, others, await environment.step(None, turn_of("fine"))

    error, others, after = run("Bad", use, workers=2, step_timeout_s=8)

    assert error.kind == "timeout"
    assert f"{OWN}:Bad.step exceeded rollout.episodes.step_timeout_s = 8 s (" in str(error)
    assert [step.is_done for step in (*others, after)] == [True] * 4


def test_a_step_that_needs_too_much_memory_names_the_limit():
    error, after = fail(call=lambda environment: environment.step(None, turn_of("eat_memory")))

    assert error.kind == "error"
    assert "Bad.step exceeded rollout.episodes.memory_limit_mb = 512 (" in str(error)
    assert after.is_done


def test_a_step_that_ends_its_process_is_tried_twice_and_is_an_error():
    error, after = fail(call=lambda environment: environment.step(None, turn_of("leave")))

    assert error.kind == "error"
    assert "Bad.step failed: it ended two processes" in str(error)
    assert after.is_done


def test_a_step_whose_process_is_ended_from_outside_is_taken_by_another(tmp_path):
    path = tmp_path / "steps"

    async def use(environment):
        state = await environment.start(task_of(path=str(path)))
        return await environment.step(state, turn_of())

    assert run("EndsOnce", use).is_done
    assert len(set(path.read_text().split())) == 2


def test_what_an_environment_prints_or_reads_does_not_disturb_the_messages(capfd):
    async def use(environment):
        return [await environment.step(None, turn_of("print_and_read")) for _ in range(2)]

    assert [step.state for step in run("Bad", use)] == ["", ""]
    assert "printed by an environment" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Missing", f"module {OWN} has no 'Missing'"),
        ("Greedy", "MemoryError:; raise rollout.episodes.memory_limit_mb"),
    ],
)
def test_a_class_that_cannot_be_used_is_one_line_before_any_episode(name, message):
    async def use(environment):
        raise AssertionError("it was opened")

    with pytest.raises(RolloutError) as raised:
        run(name, use)
    assert type(raised.value) is RolloutError
    place = rf"rollout\.environment: '{OWN}:{name}' "
    assert re.fullmatch(rf"{place}.*{message}.*", str(raised.value))


def test_a_closed_environment_refuses_episodes():
    async def use(environment):
        running = asyncio.create_task(environment.step(None, turn_of("hang")))
        await asyncio.sleep(0.2)
        await environment.close()
        for call in (running, environment.start(task_of())):
            with pytest.raises(RolloutError, match=r"^rollout\.environment: .* is closed"):
                await call

    run("Bad", use)


def test_processes_import_no_torch():
    program = (
        "import sys, bapo_megatron.runtime.worker, bapo_megatron.environment.handler\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'jinja2'} & set(sys.modules)))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout == "[]\n"


def run_without_a_loop(coroutine):
    """The result of a coroutine that never waits for anything."""
    with pytest.raises(StopIteration) as returned:
        coroutine.send(None)
    return returned.value.value


def never_asked_for():
    raise AssertionError("decoding a turn that nobody reads costs time")


def test_a_single_turn_ends_the_episode_and_never_waits():
    environment = load_environment(RolloutConfig())
    assert isinstance(environment, SingleTurn)
    run_without_a_loop(environment.open())
    assert run_without_a_loop(environment.start(task_of())) is None
    step = run_without_a_loop(environment.step(None, never_asked_for))
    assert step == Step(None, messages=(), token_ids=(), is_done=True)
    run_without_a_loop(environment.close())
