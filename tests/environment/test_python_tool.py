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
from tests.sandbox.host import require_bubblewrap, traces

require_bubblewrap()

TASK = Task("p:0", "set", "?", "42", seed=7)


OPTIONS = {"sandbox": {"timeout_s": 2.0}, "max_output_characters": 200}


@pytest.fixture
def tool() -> Iterator[PythonTool]:
    tool = PythonTool(OPTIONS, turn_timeout_s=24.0)
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
        other = PythonTool(OPTIONS, turn_timeout_s=24.0)
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
    assert endless == (
        "[the cell was ended: a cell has 2 s, all calls of a turn 24 s; what it changed is lost]"
    )
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
    with pytest.raises(ValueError, match=r"step_timeout_s must be at least 6\.25 with"):
        RolloutConfig(
            environment="python_tool", tool_format="hermes", episodes={"step_timeout_s": 5}
        )


NOTHING = "nothing"
LONG = "[the cell was ended: a cell has 1 s, all calls of a turn 3 s; what it changed is lost]"
SKIPPED = "[not run: all calls of a turn have 3 s and 1,000,000 characters]"
EXIT = "[the cell ended its interpreter; what it changed is lost]"
LOST = (
    "[not run: the cells before did not run again within 3 s; the interpreter was restarted, and "
    "their variables are lost]"
)
ENDLESS = "while True: pass"
EXITS = "import os; os._exit(0)"
KILLED = "import os; os.kill(os.getpid(), 9)"
FORGED = """
import os, sys
frame = sys._getframe()
while "mark" not in frame.f_locals:
    frame = frame.f_back
os.write(1, frame.f_locals["mark"] + b"0")
"""
LATER = "import os, threading\nthreading.Timer(0.1, os._exit, (0,)).start()"
ALL = "import subprocess\nsubprocess.run('kill -9 1; kill -9 -1', shell=True)"
BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
CHAIN = "import os\nif os.fork() == 0:\n    while True:\n        if os.fork(): os._exit(0)"
ATTACKS: dict[str, tuple[list[str], list[str], str]] = {
    "eight endless calls": ([], [ENDLESS] * 8, SKIPPED),
    "cells that take long again": (["import time; time.sleep(0.9)"] * 7, ["1"], LOST),
    "a cell that hangs when it runs again": ([ENDLESS], ["1"], LOST),
    "a cell that exits when it runs again": ([EXITS], ["1"], LOST),
    "a cell that is killed when it runs again": ([KILLED], ["1"], LOST),
    "exit": ([], [EXITS], EXIT),
    "exit with the status of a kill": ([], ["import os; os._exit(137)"], EXIT),
    "kill itself": ([], [KILLED], EXIT),
    "kill everything": ([], [ALL], EXIT),
    "stop itself": ([], ["import os; os.kill(os.getpid(), 19)"], LONG),
    "a wild pointer": ([], ["import ctypes; ctypes.string_at(0)"], EXIT),
    "no descriptors": ([], ["import os; os.closerange(0, 256)"], EXIT),
    "a thread that exits later": ([], [LATER, ENDLESS], EXIT),
    "a forged mark": ([], [FORGED + ENDLESS, "1"], LONG),
    "a forged mark of an orphan": ([], [FORGED + f"if os.fork(): os._exit(0)\n{ENDLESS}"], NOTHING),
    "a bomb of forks": ([], [BOMB], LONG),
    "a chain of forks": ([], [CHAIN], NOTHING),
    "much memory": ([], ["x = bytearray(1 << 34)"], "Traceback"),
    "a long cell": ([], ["#" * 1_100_000], "error: the state must have at most 1,000,000 bytes"),
    "a lone surrogate": ([], ["'\ud800'"], "UnicodeEncodeError"),
    "much output": ([], ["print('x' * 300_000)"] * 20, SKIPPED),
}
"""Cells before, the calls of a turn, and the beginning of the last output."""


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_an_output_and_leaves_nothing(name: str) -> None:
    before, codes, expected = ATTACKS[name]
    traces_before = traces()
    options = {"sandbox": {"timeout_s": 1.0}, "max_output_characters": 100_000}
    tool = PythonTool(options, turn_timeout_s=3.0)
    honest = tool.step(tool.start(TASK), turn_of("x = 6")).state
    state = {"cells": tool.start(TASK)["cells"] + before}
    step = tool.step(state, turn_of(*codes))
    assert (outputs(step)[-1] or NOTHING).startswith(expected)
    [later] = outputs(tool.step(step.state, turn_of("1")))
    assert later in ("1\n", EXIT, LONG, LOST)
    assert outputs(tool.step(honest, turn_of("x * 7"))) == ["42\n"]
    tool._sandbox.close()
    assert traces() == traces_before


def test_after_cells_that_do_not_run_again_the_interpreter_is_new() -> None:
    tool = PythonTool({"sandbox": {"timeout_s": 1.0}}, turn_timeout_s=3.0)
    start = tool.start(TASK)
    step = tool.step({"cells": start["cells"] + ["x = 1", EXITS]}, turn_of("x"))
    assert step.state == start
    assert step.counts["failures_lost"] == 1
    assert outputs(tool.step(step.state, turn_of("6 * 7"))) == ["42\n"]
    tool._sandbox.close()


def test_an_interpreter_ends_with_its_episode_and_when_another_takes_its_place(
    tool: PythonTool,
) -> None:
    before = traces()
    first = [tool.step(tool.start(TASK), turn_of("x = 1")) for _ in range(2)]
    assert len(tool._sandbox._processes) == 1
    assert tool.step(first[0].state, turn_of()).is_done
    assert traces() == before


async def test_a_turn_of_endless_calls_ends_before_its_step() -> None:
    config = RolloutConfig(
        environment="python_tool",
        tool_format="hermes",
        python_tool={"sandbox": {"timeout_s": 1}},
        episodes={"step_timeout_s": 10, "workers": 1},
    )
    environment = load_environment(config)
    try:
        await environment.open()
        state = await environment.start(TASK)
        step = await environment.step(state, lambda: turn_of(*[ENDLESS] * 20))
        assert outputs(step)[-1] == SKIPPED.replace("3 s", "8 s")
    finally:
        await environment.close()
