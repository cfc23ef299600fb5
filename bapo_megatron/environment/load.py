"""From ``rollout.environment`` to the environment."""

from collections.abc import Callable
from typing import Any

from bapo_megatron.config.rollout import SINGLE_TURN, EpisodesConfig
from bapo_megatron.environment.base import Environment, Step, Task, Turn
from bapo_megatron.environment.in_workers import WorkerEnvironment

_END = Step(state=None, is_done=True)


def load_environment(name: str, limits: EpisodesConfig) -> Environment:
    """Set an environment up; nothing is imported or started before ``open``.

    Args:
        name: ``single_turn``, or ``package.module:Class`` of a ``base.UserEnvironment``.
        limits: Number of its processes, and their limits of time and memory.
    """
    return SingleTurn() if name == SINGLE_TURN else WorkerEnvironment(name, limits)


class SingleTurn:
    """The environment of a plain prompt and its response: ends every episode with its first turn.

    Its calls never let other tasks run.
    """

    async def open(self) -> None:
        """There is nothing to prepare."""

    async def start(self, task: Task) -> Any:
        """There is no state."""
        return None

    async def step(self, state: Any, turn: Callable[[], Turn]) -> Step:
        """End the episode."""
        return _END

    async def close(self) -> None:
        """There is nothing to end."""
