"""Loads what ``rollout.environment`` names: ``single_turn``, or a class in worker processes."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from types import MappingProxyType
from typing import Any

from bapo_megatron.config.rollout import SINGLE_TURN, TURN_FRACTION, EpisodesConfig, RolloutConfig
from bapo_megatron.environment.base import Environment, EnvironmentFailedError, Step, Task, Turn
from bapo_megatron.errors import RolloutError
from bapo_megatron.runtime.workers import WorkerPool


def load_environment(config: RolloutConfig) -> Environment:
    """Set up what ``rollout.environment`` names; nothing is imported or started before ``open``."""
    if config.environment == SINGLE_TURN:
        return SingleTurn()
    tool, turn_s = config.python_tool, TURN_FRACTION * config.episodes.step_timeout_s
    options = {"options": tool.model_dump(mode="json"), "turn_timeout_s": turn_s}
    return WorkerEnvironment(config.environment, config.episodes, options)


class SingleTurn:
    """Ends every episode after its first turn; never yields to other tasks."""

    async def open(self) -> None:
        """Do nothing."""

    async def start(self, task: Task) -> Any:
        """Return no state."""
        return None

    async def step(self, state: Any, turn: Callable[[], Turn]) -> Step:
        """End the episode."""
        return Step(state=None, is_done=True)

    async def close(self) -> None:
        """Do nothing."""


class WorkerEnvironment:
    """Runs a ``base.UserEnvironment`` in worker processes, each call under limits."""

    def __init__(
        self, name: str, limits: EpisodesConfig, options: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Set up workers for ``package.module:Class``, or a built-in name with its options.

        ``open`` starts the first one.
        """
        self._name = name
        self._limits = limits
        self._workers = WorkerPool(
            "bapo_megatron.environment.handler:build",
            (name, dict(options)),
            label=f"'{name}'",
            workers=limits.workers,
            timeout_s=limits.step_timeout_s,
            memory_limit_mb=limits.memory_limit_mb,
            error=lambda text: RolloutError(f"rollout.environment: {text}"),
        )

    async def open(self) -> None:
        """Load the class in one process, so that an unusable one fails now."""
        await self._workers.start()

    async def start(self, task: Task) -> Any:
        """See ``base.Environment.start``."""
        request = {"task": {**_fields_of(task), "row": dict(task.row)}}
        return await self._ask("start", request, f"prompt '{task.prompt_id}'")

    async def step(self, state: Any, turn: Callable[[], Turn]) -> Step:
        """See ``base.Environment.step``."""
        played = turn()
        request = {
            "state": state,
            "turn": {**_fields_of(played), "calls": [asdict(call) for call in played.calls]},
        }
        place = f"prompt '{played.prompt_id}', turn {played.number}"
        state, messages, token_ids, is_done, counts = await self._ask("step", request, place)
        return Step(state, messages, tuple(token_ids), is_done, counts)

    async def close(self) -> None:
        """Stop every process. Safe to call twice."""
        await self._workers.close()

    async def _ask(self, method: str, request: dict[str, Any], place: str) -> Any:
        outcome = await self._workers.ask(request)
        if outcome.kind == "result":
            return outcome.value
        limits, remedy = self._limits, "correct it, raise the limit,"
        if outcome.kind == "timeout":
            problem = f"exceeded rollout.episodes.step_timeout_s = {limits.step_timeout_s:g} s"
        elif outcome.kind == "memory":
            problem = f"exceeded rollout.episodes.memory_limit_mb = {limits.memory_limit_mb}"
        else:
            died = "it ended two processes, or wrote into their replies"
            reason = died if outcome.kind == "died" else outcome.value
            problem, remedy = f"failed: {reason}", "correct it,"
        raise EnvironmentFailedError(
            f"rollout.environment: {self._name}.{method} {problem} ({place}); {remedy} or set "
            "rollout.episodes.on_error=zero",
            "timeout" if outcome.kind == "timeout" else "error",
        )


def _fields_of(record: Task | Turn) -> dict[str, Any]:
    # ``asdict`` would copy every token.
    return {field.name: getattr(record, field.name) for field in fields(record)}
