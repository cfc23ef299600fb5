"""The policy's Python: cells, outputs, failures, and what a step depends on."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.data.tools import ToolCall
from bapo_megatron.environment.base import EnvironmentFailedError, Step, Task, Turn
from bapo_megatron.environment.load import load_environment
from bapo_megatron.environment.python_tool import PythonTool
from bapo_megatron.errors import RolloutError
from tests.sandbox.host import require_bubblewrap

require_bubblewrap()

TASK = Task("p:0", "set", "?", "42", seed=7)


OPTIONS = {"sandbox": {"timeout_s": 2.0}, "max_output_characters": 200}


@pytest.fixture
def tool() -> Iterator[PythonTool]:
    tool = PythonTool(OPTIONS)
    yield tool
    tool._sandbox.close()


def turn_of(*codes: str | ToolCall) -> Turn:
    calls = (c if isinstance(c, ToolCall) else ToolCall("python", {"code": c}) for c in codes)
    return Turn(0, "…", (), remaining_tokens=100, prompt_id="p:0", calls=tuple(calls))


def outputs(step: Step) -> list[str]:
    assert {message["role"] for message in step.messages} == {"tool"}
    return [message["content"] for message in step.messages]


def test_cells_share_variables_over_turns_and_calls(tool: PythonTool) -> None:
    first = tool.step(tool.start(TASK), turn_of("x = 6", "x * 7"))
    assert outputs(first) == ["", "42\n"]
    second = tool.step(first.state, turn_of("print(x + 1)"))
    assert outputs(second) == ["7\n"]
    assert second.state["cells"][1:] == ["x = 6", "x * 7", "print(x + 1)"]
    assert tool.step(second.state, turn_of()) == Step(second.state, is_done=True)


def test_a_step_depends_on_state_and_turn_alone(tool: PythonTool) -> None:
    codes = ["import random\nx = random.random()", "y = {x, 'a', 'b'}\n1 / 0", "print(x, y)"]
    state: Any = tool.start(TASK)
    seen = []
    for code in codes:
        seen.append((state, code))
        step = tool.step(state, turn_of(code))
        seen[-1] += (outputs(step), step.state)
        state = step.state
    tool._warm.clear()
    for before, code, written, after in seen:  # in another process, after JSON
        other = PythonTool(OPTIONS)
        step = other.step(json.loads(json.dumps(before)), turn_of(code))
        assert (outputs(step), step.state) == (written, after)
        other._sandbox.close()


def test_branches_of_one_state_do_not_meet(tool: PythonTool) -> None:
    state = tool.step(tool.start(TASK), turn_of("x = [1]")).state
    assert outputs(tool.step(state, turn_of("x.append(2); x"))) == ["[1, 2]\n"]
    assert outputs(tool.step(state, turn_of("x.append(3); x"))) == ["[1, 3]\n"]


def test_what_cannot_be_called_or_fails_is_read_by_the_policy(tool: PythonTool) -> None:
    step = tool.step(
        tool.start(TASK),
        turn_of(
            ToolCall(error="a tool call is not valid JSON"),
            ToolCall("python", {"kode": "1"}),
            "1 / 0",
            "while True: pass",
            "while True: print('x' * 1000)",
            "print('x' * 1000)",
        ),
    )
    wrong, unknown, error, endless, flood, long = outputs(step)
    assert wrong == "error: a tool call is not valid JSON"
    assert unknown == 'error: the arguments of python must be {"code": text}'
    assert error.endswith("ZeroDivisionError: division by zero\n")
    assert endless == "[the cell was ended after 2 s; what it changed is lost]"
    assert flood.endswith("[the cell was ended for its output; what it changed is lost]")
    assert long == "x" * 100 + "\n[801 characters left out]\n" + "x" * 99 + "\n"
    assert step.state["cells"][1:] == ["1 / 0", "print('x' * 1000)"]
    kinds = {name: n for name, n in step.counts.items() if name != "seconds"}
    assert kinds == {
        "calls": 6,
        "failures_call": 2,
        "failures_error": 1,
        "failures_timeout": 1,
        "failures_output": 1,
    }


async def test_episodes_run_in_workers_by_the_name_of_the_configuration() -> None:
    config = RolloutConfig(environment="python_tool", tool_format="hermes")
    environment = load_environment(config)
    try:
        await environment.open()
        state = await environment.start(TASK)
        step = await environment.step(state, lambda: turn_of("6 * 7"))
        assert outputs(step) == ["42\n"]
        assert (await environment.step(step.state, turn_of)).is_done
    finally:
        await environment.close()


async def test_without_a_sandbox_the_start_fails_by_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    environment = load_environment(RolloutConfig(environment="python_tool", tool_format="hermes"))
    with pytest.raises(RolloutError, match="'python_tool' needs a sandbox: bubblewrap") as raised:
        await environment.open()
    assert not isinstance(raised.value, EnvironmentFailedError)
    await environment.close()


def test_a_cell_ends_before_its_step() -> None:
    with pytest.raises(ValueError, match="step_timeout_s must be above python_tool"):
        RolloutConfig(
            environment="python_tool", tool_format="hermes", episodes={"step_timeout_s": 5}
        )
