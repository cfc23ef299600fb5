"""A user's environment in processes of its own, each call under limits.

Its code can neither stall the event loop that generates nor end the process.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from bapo_megatron.config.rollout import EpisodesConfig
from bapo_megatron.environment.base import EnvironmentFailedError, Step, Task, Turn
from bapo_megatron.errors import RolloutError
from bapo_megatron.runtime.workers import WorkerPool


class WorkerEnvironment:
    """Runs a ``base.UserEnvironment``; belongs to the event loop that first calls it."""

    def __init__(self, name: str, limits: EpisodesConfig) -> None:
        """Set the processes up; ``open`` starts the first one.

        ``name`` is ``package.module:Class``. ``limits`` has the number of processes, which is that
        of concurrent calls, and the limits of a call, which exclude the wait for a free process.
        """
        self._name = name
        self._limits = limits
        self._workers = WorkerPool(
            "bapo_megatron.environment.handler:build",
            (name,),
            label=f"'{name}'",
            workers=limits.workers,
            timeout_s=limits.step_timeout_s,
            memory_limit_mb=limits.memory_limit_mb,
            error=lambda text: RolloutError(f"rollout.environment: {text}"),
        )

    async def open(self) -> None:
        """Load the class in one process, so that one that cannot be loaded is found now."""
        await self._workers.start()

    async def start(self, task: Task) -> Any:
        """See ``base.Environment.start``."""
        request = {"task": {**_fields_of(task), "row": dict(task.row)}}
        return await self._ask("start", request, f"prompt '{task.prompt_id}'")

    async def step(self, state: Any, turn: Callable[[], Turn]) -> Step:
        """See ``base.Environment.step``."""
        played = turn()
        request = {"state": state, "turn": _fields_of(played)}
        episode = f"prompt '{played.prompt_id}', turn {played.number}"
        state, messages, token_ids, is_done = await self._ask("step", request, episode)
        return Step(state, messages, tuple(token_ids), is_done)

    async def close(self) -> None:
        """End every process. Safe to call twice."""
        await self._workers.close()

    async def _ask(self, method: str, request: dict[str, Any], episode: str) -> Any:
        """Call a method; the process that runs it checks what it returns."""
        outcome = await self._workers.ask(request)
        if outcome.kind == "result":
            return outcome.value
        limits, remedy = self._limits, "correct it, raise the limit,"
        if outcome.kind == "timeout":
            limit = f"rollout.episodes.step_timeout_s = {limits.step_timeout_s:g} s"
            what = f"must return within {limit}, and did not"
        elif outcome.kind == "memory":
            limit = f"rollout.episodes.memory_limit_mb = {limits.memory_limit_mb}"
            what = f"needs more memory than {limit}"
        else:
            died = "it ended two processes, or wrote into their replies"
            reason = died if outcome.kind == "died" else outcome.value
            what, remedy = f"failed: {reason}", "correct it,"
        raise EnvironmentFailedError(
            f"rollout.environment: {self._name}.{method} {what} ({episode}); {remedy} or set "
            "rollout.episodes.on_error=zero",
            "timeout" if outcome.kind == "timeout" else "error",
        )


def _fields_of(record: Task | Turn) -> dict[str, Any]:
    """The fields by name; ``asdict`` would copy every token."""
    return {field.name: getattr(record, field.name) for field in fields(record)}
