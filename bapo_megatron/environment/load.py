"""From ``rollout.environment`` to the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bapo_megatron.config.rollout import SINGLE_TURN
from bapo_megatron.environment.in_workers import WorkerEnvironment
from bapo_megatron.environment.single_turn import SingleTurn

if TYPE_CHECKING:
    from bapo_megatron.config.rollout import EpisodesConfig
    from bapo_megatron.environment.base import Environment


def load_environment(name: str, limits: EpisodesConfig) -> Environment:
    """Set an environment up; nothing is imported or started before ``open``.

    Args:
        name: ``single_turn``, or ``package.module:Class`` of a ``base.UserEnvironment``.
        limits: Number of its processes, and their limits of time and memory.
    """
    if name == SINGLE_TURN:
        return SingleTurn()
    return WorkerEnvironment(
        name,
        workers=limits.workers,
        step_timeout_s=limits.step_timeout_s,
        memory_limit_mb=limits.memory_limit_mb,
    )
