"""From ``rollout.environment`` to the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bapo_megatron.config.rollout import SINGLE_TURN
from bapo_megatron.environment.in_workers import WorkerEnvironment
from bapo_megatron.environment.single_turn import SingleTurn

if TYPE_CHECKING:
    from bapo_megatron.environment.base import Environment


def load_environment(
    name: str, *, workers: int, step_timeout_s: float, memory_limit_mb: int
) -> Environment:
    """Set an environment up; nothing is imported or started before ``open``.

    Args:
        name: ``single_turn``, or ``package.module:Class`` of a ``base.UserEnvironment``.
        workers: Number of its processes.
        step_timeout_s: Time limit of one ``start`` or ``step``.
        memory_limit_mb: Limit of a process's address space, in 10^6 · 1.048576 bytes.
    """
    if name == SINGLE_TURN:
        return SingleTurn()
    return WorkerEnvironment(
        name, workers=workers, step_timeout_s=step_timeout_s, memory_limit_mb=memory_limit_mb
    )
