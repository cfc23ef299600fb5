"""Turns of any policy as cells of ``python_tool``: a random model would never write a call."""

from dataclasses import replace
from typing import Any

from bapo_megatron.data.tools import ToolCall
from bapo_megatron.environment.base import Step, Task, Turn
from bapo_megatron.environment.python_tool import PythonTool

TURNS = 3
CELL = """
import time
time.sleep(0.05)
seen = globals().get("seen", 0) + {total}
print("1+" + str(seen % 10) + "=?")
"""


class Cells:
    """Asks for as many turns as ``TURNS``, with what the cell prints."""

    def __init__(self) -> None:
        self._tool = PythonTool({"sandbox": {"timeout_s": 20.0}}, turn_timeout_s=40.0)

    def start(self, task: Task) -> Any:
        return self._tool.start(task)

    def step(self, state: Any, turn: Turn) -> Step:
        if turn.number + 1 == TURNS:
            return Step(state, is_done=True)
        code = CELL.format(total=sum(turn.token_ids))
        step = self._tool.step(state, replace(turn, calls=(ToolCall("python", {"code": code}),)))
        assert not [name for name in step.counts if name.startswith("failures")], step
        messages = [{"role": "user", "content": message["content"]} for message in step.messages]
        return replace(step, messages=messages)


def seen(state: Any, turns: tuple[str, ...]) -> float:
    """A reward that needs every cell of the episode."""
    # A response that reaches its length has an output that nobody read.
    assert len(state["cells"]) - 1 - len(turns) // 2 in (0, 1)
    return float(sum(map(len, turns)) % 2)
