"""The environment of a plain prompt and its response."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bapo_megatron.environment.base import Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from bapo_megatron.environment.base import Task, Turn

_END = Step(state=None, is_done=True)


class SingleTurn:
    """Ends every episode with its first turn; its calls never let other tasks run."""

    async def open(self) -> None:
        """There is nothing to prepare."""

    async def start(self, task: Task) -> Any:
        """No state."""
        return None

    async def step(self, state: Any, turn: Callable[[], Turn]) -> Step:
        """The end."""
        return _END

    async def close(self) -> None:
        """There is nothing to end."""
