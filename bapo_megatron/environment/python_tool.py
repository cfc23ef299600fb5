"""The environment ``python_tool``: the policy writes and runs Python over several turns.

The tool ``python`` takes ``code``. An episode ends with a turn without a call, whose text is graded
like any response. The state is the list of the cells that were run: they run again in a fresh
interpreter wherever the episode continues, in this process or another, so that a step depends on
state and turn alone. An interpreter that is still warm saves that, and nothing else; it is paused
between cells. No cell can make a step fail: all calls of a turn and the cells that run again for
them share a time limit, and whatever ends an interpreter is told to the policy.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from bapo_megatron.config.rollout import PythonToolConfig
from bapo_megatron.environment.base import Step
from bapo_megatron.environment.handler import check_state
from bapo_megatron.runtime.names import LoadError
from bapo_megatron.sandbox.base import Outcome, SandboxError, SandboxLostError, run_twice
from bapo_megatron.sandbox.bubblewrap import Session, open_sandbox

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bapo_megatron.data.tools import ToolCall
    from bapo_megatron.environment.base import Task, Turn

_MAX_WARM = 4
"""Interpreters that each worker keeps."""
_MAX_TURN_CHARACTERS = 1_000_000
"""Outputs of a turn, beyond which no further call runs: the reply of a worker has 16 MB."""
_SEED = "import random; random.seed({seed})\n"
_ENDINGS = {
    "timeout": "[the cell was ended: a cell has {cell_s:g} s, all calls of a turn {turn_s:g} s; "
    "what it changed is lost]",
    "memory": "[the cell was ended for its memory; what it changed is lost]",
    "output": "[the cell was ended for its output; what it changed is lost]",
    "exit": "[the cell ended its interpreter; what it changed is lost]",
    "skipped": "[not run: all calls of a turn have {turn_s:g} s and 1,000,000 characters]",
    "lost": "[not run: the cells before did not run again within {turn_s:g} s; the interpreter was "
    "restarted, and their variables are lost]",
}


class _NotReplayedError(Exception):
    """The cells before did not run again."""


class PythonTool:
    """See ``base.UserEnvironment``."""

    def __init__(self, options: Mapping[str, Any], turn_timeout_s: float) -> None:
        """Open the sandbox; ``options`` are the values of a ``PythonToolConfig``.

        ``turn_timeout_s`` is the time limit of all calls of a turn.

        Raises:
            LoadError: The sandbox does not work here.
        """
        self._config = PythonToolConfig.model_validate(options)
        self._turn_timeout_s = turn_timeout_s
        limits = {"cell_s": self._config.sandbox.timeout_s, "turn_s": turn_timeout_s}
        self._endings = {name: text.format(**limits) for name, text in _ENDINGS.items()}
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
            self._close_warm(tuple(state["cells"]))
            return Step(state, is_done=True)
        cells, messages, counts = tuple(state["cells"]), [], {"calls": 0.0, "seconds": 0.0}
        start_s, num_characters = time.monotonic(), 0
        for call in turn.calls:
            is_full = num_characters > _MAX_TURN_CHARACTERS
            deadline_s = start_s if is_full else start_s + self._turn_timeout_s
            cells, output, failure = self._answer(cells, call, deadline_s)
            num_characters += len(output)
            counts["calls"] += 1
            if failure:
                counts[f"failures_{failure}"] = counts.get(f"failures_{failure}", 0.0) + 1
            messages.append({"role": "tool", "name": "python", "content": output})
        counts["seconds"] = time.monotonic() - start_s
        return Step({"cells": list(cells)}, messages, counts=counts)

    def _answer(
        self, cells: tuple[str, ...], call: ToolCall, deadline_s: float
    ) -> tuple[tuple[str, ...], str, str]:
        """Return the cells so far, the tool's output, and the kind of failure or nothing."""
        if call.error:
            return cells, f"error: {call.error}", "call"
        code = call.arguments.get("code")
        if not isinstance(code, str) or len(call.arguments) != 1:
            return cells, 'error: the arguments of python must be {"code": text}', "call"
        try:
            check_state({"cells": [*cells, code]})
        except ValueError as error:
            return cells, f"error: {error}", "call"
        text, ending = "", "skipped"
        if time.monotonic() < deadline_s:
            try:
                outcome = run_twice(lambda: self._run(cells, code, deadline_s))
                text, ending = self._cut(outcome.stdout), outcome.ending
            except _NotReplayedError:
                cells, ending = cells[:1], "lost"
        if ending in self._endings:
            return cells, text + self._endings[ending], ending
        return (*cells, code), text, "" if ending == "ok" else "error"

    def _run(self, cells: tuple[str, ...], code: str, deadline_s: float) -> Outcome:
        session = self._warm.pop(cells, None) or self._replayed(cells, deadline_s)
        limit_s = min(self._config.sandbox.timeout_s, deadline_s - time.monotonic())
        outcome = session.run(code, limit_s)
        if not session.has_ended:
            self._keep_warm((*cells, code), session)
        return outcome

    def _replayed(self, cells: tuple[str, ...], deadline_s: float) -> Session:
        session = self._sandbox.session()
        for cell in cells:
            try:
                session.run(cell, deadline_s - time.monotonic())
            except SandboxLostError as error:
                if error.outcome is None:
                    raise
            if session.has_ended:
                raise _NotReplayedError
        return session

    def _keep_warm(self, cells: tuple[str, ...], session: Session) -> None:
        self._close_warm(cells)  # of another episode, or the same step again
        session.pause()
        if not session.has_ended:
            self._warm[cells] = session
        if len(self._warm) > _MAX_WARM:
            self._close_warm(next(iter(self._warm)))

    def _close_warm(self, cells: tuple[str, ...]) -> None:
        if (session := self._warm.pop(cells, None)) is not None:
            session.close()

    def _cut(self, text: str) -> str:
        """Return an output without its middle if it is too long for the policy."""
        limit = self._config.max_output_characters
        if len(text) <= limit:
            return text
        half = limit // 2
        return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
