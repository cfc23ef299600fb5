import asyncio
import re
import subprocess
import sys

import pytest

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.environment.base import EnvironmentFailedError, Step, Task, Turn
from bapo_megatron.environment.load import SingleTurn, WorkerEnvironment, load_environment
from bapo_megatron.errors import RolloutError

OWN = "tests.environment.own_environments"


def task_of(**row):
    return Task("set:7", "set", "What?", "", row, seed=11)


def turn_of(text="", number=0, token_ids=()):
    return lambda: Turn(number, text, token_ids, remaining_tokens=100, prompt_id="set:7")


def run(name, use, *, workers=1, step_timeout_s=20.0):
    """What ``use`` returns for an environment, which is opened before it and closed after it."""

    async def main():
        limits = {"workers": workers, "step_timeout_s": step_timeout_s, "memory_limit_mb": 512}
        environment = load_environment(RolloutConfig(environment=f"{OWN}:{name}", episodes=limits))
        assert isinstance(environment, WorkerEnvironment)
        try:
            await environment.open()
            return await use(environment)
        finally:
            await environment.close()

    return asyncio.run(main())


def test_episodes_run_side_by_side_and_their_states_travel_between_processes():
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

    for number, (said, step) in enumerate(run("Countdown", use, workers=2)):
        assert said == ["2 left", "1 left"]
        heard = [f"{number}.0", f"{number}.1", f"{number}.2"]
        assert step == Step({"left": 0, "seed": 11, "heard": heard}, [], (), is_done=True)


@pytest.mark.slow
def test_a_step_that_fails_is_one_line_with_place_and_remedy_and_later_ones_go_on():
    failures = {
        "returns_no_step": ("error", "failed: ValueError: step must return a Step.*"),
        "raises": ("error", "failed: RuntimeError: cannot step.*"),
        "leave": ("error", "failed: it ended two processes.*"),
        "eat_memory": ("error", r"exceeded rollout\.episodes\.memory_limit_mb = 512"),
        "hang": ("timeout", r"exceeded rollout\.episodes\.step_timeout_s = 8 s"),
    }

    async def use(environment):
        outcomes = {}
        for text in (*failures, "deepest_state", "fine"):
            try:
                outcomes[text] = await environment.step(None, turn_of(text, number=2))
            except EnvironmentFailedError as error:
                outcomes[text] = error
        return outcomes

    outcomes = run("Bad", use, step_timeout_s=8)
    assert outcomes.pop("fine") == Step(1, [], (), is_done=True)
    assert outcomes.pop("deepest_state").is_done
    for text, (kind, reason) in failures.items():
        assert outcomes[text].kind == kind
        place = r"\(prompt 'set:7', turn 2\); correct it, .*rollout\.episodes\.on_error=zero"
        assert re.fullmatch(
            rf"rollout\.environment: {OWN}:Bad\.step {reason} {place}", str(outcomes[text])
        )


def test_a_class_that_cannot_be_used_is_one_line_before_any_episode():
    async def use(environment):
        raise AssertionError("it was opened")

    with pytest.raises(RolloutError) as raised:
        run("Boundless", use)
    assert type(raised.value) is RolloutError
    place = rf"rollout\.environment: '{OWN}:Boundless' "
    remedy = r"MemoryError:; raise rollout\.episodes\.memory_limit_mb"
    assert re.fullmatch(rf"{place}.*{remedy}.*", str(raised.value))


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
