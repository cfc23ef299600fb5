"""The environment ``python_tool``: the policy writes and runs Python over several turns.

The tool ``python`` takes ``code``. An episode ends with a turn without a call, whose text is graded
like any response. The state is the list of the cells that were run: they run again in a fresh
interpreter wherever the episode continues, in this process or another, so that a step depends on
state and turn alone. An interpreter that is still warm saves that, and nothing else.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from bapo_megatron.config.rollout import PythonToolConfig
from bapo_megatron.environment.base import Step
from bapo_megatron.runtime.names import LoadError
from bapo_megatron.sandbox.base import Outcome, SandboxError, SandboxLostError, run_twice
from bapo_megatron.sandbox.bubblewrap import Session, open_sandbox

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bapo_megatron.data.tools import ToolCall
    from bapo_megatron.environment.base import Task, Turn

_MAX_WARM = 4
"""Interpreters that each worker keeps."""
_REPLAY_FACTOR = 4
"""A cell that ran within its limit may take this much longer when it runs again."""
_SEED = "import random; random.seed({seed})\n"
_ENDINGS = {
    "timeout": "[the cell was ended after {limit:g} s; what it changed is lost]",
    "memory": "[the cell was ended for its memory; what it changed is lost]",
    "output": "[the cell was ended for its output; what it changed is lost]",
}


class PythonTool:
    """See ``base.UserEnvironment``."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Open the sandbox; ``options`` are the values of a ``PythonToolConfig``.

        Raises:
            LoadError: The sandbox does not work here.
        """
        self._config = PythonToolConfig.model_validate(options)
        try:
            self._sandbox = open_sandbox(self._config.sandbox)
        except SandboxError as error:
            raise LoadError(f"needs a sandbox: {error}") from error
        self._warm: OrderedDict[tuple[str, ...], Session] = OrderedDict()

    def start(self, task: Task) -> dict[str, Any]:
        """Return the state before the first cell, which seeds ``random``."""
        return {"cells": [_SEED.format(seed=task.seed)]}

    def step(self, state: dict[str, Any], turn: Turn) -> Step:
        """Run the calls of a turn, or end the episode if it has none."""
        if not turn.calls:
            return Step(state, is_done=True)
        cells, messages, counts = tuple(state["cells"]), [], {"calls": 0.0, "seconds": 0.0}
        for call in turn.calls:
            start_s = time.perf_counter()
            cells, output, failure = self._answer(cells, call)
            counts["seconds"] += time.perf_counter() - start_s
            counts["calls"] += 1
            if failure:
                counts[f"failures_{failure}"] = counts.get(f"failures_{failure}", 0.0) + 1
            messages.append({"role": "tool", "name": "python", "content": output})
        return Step({"cells": list(cells)}, messages, counts=counts)

    def _answer(self, cells: tuple[str, ...], call: ToolCall) -> tuple[tuple[str, ...], str, str]:
        """Return the cells so far, the tool's output, and the kind of failure or nothing."""
        if call.error:
            return cells, f"error: {call.error}", "call"
        code = call.arguments.get("code")
        if not isinstance(code, str) or len(call.arguments) != 1:
            return cells, 'error: the arguments of python must be {"code": text}', "call"
        outcome = run_twice(lambda: self._run(cells, code))
        text = self._cut(outcome.stdout)
        if outcome.ending in _ENDINGS:
            limit = self._config.sandbox.timeout_s
            return cells, text + _ENDINGS[outcome.ending].format(limit=limit), outcome.ending
        return (*cells, code), text, "" if outcome.ending == "ok" else "error"

    def _run(self, cells: tuple[str, ...], code: str) -> Outcome:
        session = self._warm.pop(cells, None) or self._replayed(cells)
        outcome = session.run(code)
        if not session.has_ended:
            self._warm[(*cells, code)] = session
            if len(self._warm) > _MAX_WARM:
                self._warm.popitem(last=False)[1].close()
        return outcome

    def _replayed(self, cells: tuple[str, ...]) -> Session:
        session = self._sandbox.session()
        for cell in cells:
            session.run(cell, _REPLAY_FACTOR * self._config.sandbox.timeout_s)
            if session.has_ended:
                raise SandboxLostError(
                    "a cell that ran before did not run again within its limits; let the machine "
                    "have fewer workers, or raise rollout.python_tool.sandbox.timeout_s"
                )
        return session

    def _cut(self, text: str) -> str:
        """Return an output without its middle if it is too long for the policy."""
        limit = self._config.max_output_characters
        if len(text) <= limit:
            return text
        half = limit // 2
        return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
