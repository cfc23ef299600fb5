"""A user's environment in processes of its own, each call under limits.

Its code can neither stall the event loop that generates nor end the process.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from bapo_megatron.environment.base import EnvironmentFailedError, Step, Task
from bapo_megatron.errors import RolloutError
from bapo_megatron.workers import (
    HandlerNotLoadedError,
    WorkerNotStartedError,
    WorkerPool,
    WorkersClosedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bapo_megatron.environment.base import Turn


class WorkerEnvironment:
    """Runs a ``base.UserEnvironment``; belongs to the event loop that first calls it."""

    def __init__(
        self, name: str, *, workers: int, step_timeout_s: float, memory_limit_mb: int
    ) -> None:
        """Set the processes up; ``open`` starts the first one.

        Args:
            name: ``package.module:Class``.
            workers: Number of processes; so many episodes are stepped at a time.
            step_timeout_s: Time limit of one call, not counting the wait for a free process.
            memory_limit_mb: Limit of a process's address space, in 10^6 · 1.048576 bytes.
        """
        self._name = name
        self._step_timeout_s = step_timeout_s
        self._memory_limit_mb = memory_limit_mb
        self._workers = WorkerPool(
            "bapo_megatron.environment.handler:build",
            (name,),
            workers=workers,
            timeout_s=step_timeout_s,
            memory_limit_mb=memory_limit_mb,
        )

    async def open(self) -> None:
        """Load the class in one process.

        Raises:
            RolloutError: It cannot be loaded, or lacks a method.
        """
        with self._rollout_errors():
            await self._workers.start()

    async def start(self, task: Task) -> Any:
        """Begin an episode; see ``base.Environment.start``."""
        request = {"task": _fields_of(task)}
        return await self._ask("start", request, f"prompt '{task.prompt_id}'")

    async def step(self, state: Any, turn: Callable[[], Turn]) -> Step:
        """Answer a turn; see ``base.Environment.step``."""
        played = turn()
        request = {"state": state, "turn": _fields_of(played)}
        step = await self._ask(
            "step", request, f"prompt '{played.prompt_id}', turn {played.number}"
        )
        return Step(step["state"], step["messages"], tuple(step["token_ids"]), step["is_done"])

    async def close(self) -> None:
        """End every process. Safe to call twice."""
        await self._workers.close()

    async def _ask(self, method: str, request: dict[str, Any], episode: str) -> Any:
        """What a method returned, checked by the process that ran it."""
        with self._rollout_errors():
            outcome = await self._workers.ask(request)
        if outcome.kind == "result":
            return outcome.result
        call = f"rollout.environment: {self._name}.{method}"
        otherwise = "or set rollout.episodes.on_error=zero"
        if outcome.kind == "timeout":
            raise EnvironmentFailedError(
                f"{call} must return within rollout.episodes.step_timeout_s = "
                f"{self._step_timeout_s:g} s, and did not ({episode}); correct it, raise the "
                f"limit, {otherwise}",
                "timeout",
            )
        if outcome.kind == "memory":
            raise EnvironmentFailedError(
                f"{call} needs more memory than rollout.episodes.memory_limit_mb = "
                f"{self._memory_limit_mb} ({episode}); correct it, raise the limit, {otherwise}",
                "error",
            )
        reason = "it ended two processes" if outcome.kind == "died" else outcome.error
        raise EnvironmentFailedError(
            f"{call} failed: {reason} ({episode}); correct it, {otherwise}", "error"
        )

    @contextmanager
    def _rollout_errors(self) -> Iterator[None]:
        """Errors of the pool of workers, in the words of environments."""
        try:
            yield
        except HandlerNotLoadedError as error:
            raise RolloutError(f"rollout.environment: '{self._name}' {error}") from error
        except WorkerNotStartedError as error:
            raise RolloutError(f"rollout.environment: an environment {error}") from error
        except WorkersClosedError as error:
            raise RolloutError(
                "rollout.environment: it is closed; run episodes before closing it"
            ) from error


def _fields_of(record: Task | Turn) -> dict[str, Any]:
    """The fields by name; ``asdict`` would copy every token."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return values | ({"row": dict(record.row)} if isinstance(record, Task) else {})
