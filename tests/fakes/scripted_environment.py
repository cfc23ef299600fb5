"""An environment in this process, which answers when the test says so."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from bapo_megatron.environment.base import Step, Task, Turn


class ScriptedEnvironment:
    """Answers by a function of the state and the turn, and of nothing else."""

    def __init__(
        self, answer: Callable[[Any, Turn], Step], begin: Callable[[Task], Any] = lambda task: None
    ) -> None:
        """``answer`` is its ``step`` and ``begin`` its ``start``; both may raise."""
        self.waits = False
        """Calls wait until their future in ``waiting`` is set."""
        self.waiting: list[asyncio.Future[None]] = []
        self.tasks: list[Task] = []
        """What ``start`` was called with."""
        self.turns: list[Turn] = []
        """What ``step`` was called with."""
        self._answer = answer
        self._begin = begin

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def start(self, task: Task) -> Any:
        self.tasks.append(task)
        await self._wait()
        return self._begin(task)

    async def step(self, state: Any, turn: Callable[[], Turn]) -> Step:
        played = turn()
        self.turns.append(played)
        sent = json.dumps(state)
        await self._wait()
        return self._answer(json.loads(sent), played)

    def let_answer(self, count: int | None = None) -> None:
        """Let calls return, the first ones or all."""
        for answered in self.waiting[:count]:
            if not answered.done():
                answered.set_result(None)

    async def _wait(self) -> None:
        if not self.waits:
            return
        answered = asyncio.get_running_loop().create_future()
        self.waiting.append(answered)
        try:
            await answered
        finally:
            self.waiting.remove(answered)
