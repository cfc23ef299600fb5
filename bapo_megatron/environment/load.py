"""From ``rollout.environment`` to the environment."""

from collections.abc import Callable
from typing import Any

from bapo_megatron.config.rollout import SINGLE_TURN, EpisodesConfig
from bapo_megatron.environment.base import Environment, Step, Task, Turn
from bapo_megatron.environment.in_workers import WorkerEnvironment


def load_environment(name: str, limits: EpisodesConfig) -> Environment:
    """Set an environment up; nothing is imported or started before ``open``.

    ``name``: ``single_turn``, or ``package.module:Class`` of a ``base.UserEnvironment``.
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
        return Step(state=None, is_done=True)

    async def close(self) -> None:
        """There is nothing to end."""
