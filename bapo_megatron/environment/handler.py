"""A worker of an environment: calls the user's class and checks its results."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, StrictBool

from bapo_megatron.config.rollout import PYTHON_TOOL
from bapo_megatron.data.tools import ToolCall, checked_message
from bapo_megatron.environment.base import Step, Task, Turn, UserEnvironment
from bapo_megatron.runtime.calls import decode
from bapo_megatron.runtime.names import LoadError, load_named, shown
from bapo_megatron.runtime.worker import settled

_MAX_STATE_BYTES = 1_000_000
"""Limit of a state as JSON: every checkpoint holds the states of all episodes in progress."""
_MAX_STATE_DEPTH = 100
"""JSON is parsed recursively, and a state may contain any number of brackets that a model wrote."""
_MEMORY_REMEDY = "raise rollout.episodes.memory_limit_mb"


def build(name: str, options: Mapping[str, Any] | None = None) -> EnvironmentHandler:
    """Create the environment, a built-in one with its options.

    Raises:
        LoadError: It cannot be imported or created, or lacks a method.
    """
    try:
        if name == PYTHON_TOOL:
            from bapo_megatron.environment.python_tool import PythonTool

            return EnvironmentHandler(name, PythonTool(**(options or {})))
        return EnvironmentHandler(name, _load(name))
    except LoadError as error:
        raise LoadError(f"'{name}' {error}") from error


def _load(name: str) -> UserEnvironment:
    named = load_named(name, memory_remedy=_MEMORY_REMEDY)
    if not isinstance(named, type):
        raise LoadError(f"must name a class, got {type(named).__name__}; name a class")
    try:
        environment: UserEnvironment = named()
    except (Exception, SystemExit) as error:
        remedy = _MEMORY_REMEDY if isinstance(error, MemoryError) else "correct it"
        raise LoadError(f"must be created without arguments: {shown(error)}; {remedy}") from error
    for method, arguments in (("start", ("task",)), ("step", ("state", "turn"))):
        try:
            inspect.signature(getattr(environment, method)).bind(*arguments)
        except (AttributeError, TypeError, ValueError) as error:
            call = f"{method}({', '.join(arguments)})"
            raise LoadError(f"must have a method {call}: {error}; correct the class") from error
    return environment


class EnvironmentHandler:
    """Answers the requests of a ``WorkerEnvironment``."""

    facts = None

    def __init__(self, name: str, environment: UserEnvironment) -> None:
        self._name = name
        self._environment = environment
        self._loop = asyncio.new_event_loop()

    def name(self, request: Mapping[str, Any]) -> str:
        """See ``worker.Handler``."""
        return f"rollout.environment: {self._name}.{'start' if 'task' in request else 'step'}"

    def answer(self, request: Mapping[str, Any]) -> Any:
        """Return a first state, or the fields of a step."""
        if "task" in request:
            state = settled(self._environment.start(Task(**request["task"])), self._loop)
            check_state(state)
            return state
        fields = request["turn"]
        calls = tuple(ToolCall(**call) for call in fields["calls"])
        turn = Turn(**{**fields, "token_ids": tuple(fields["token_ids"]), "calls": calls})
        return _checked_step(settled(self._environment.step(request["state"], turn), self._loop))


def check_state(state: Any) -> None:
    """Raise a ``ValueError`` unless a state is a JSON value that checkpoints can hold."""
    try:
        size, depth = len(json.dumps(state, allow_nan=False)), _depth_of(state)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the state must be a JSON value ({error})") from error
    if size > _MAX_STATE_BYTES or depth > _MAX_STATE_DEPTH:
        raise ValueError(
            f"the state must have at most {_MAX_STATE_BYTES:,} bytes as JSON, nested at most "
            f"{_MAX_STATE_DEPTH} deep, got {size:,} bytes, nested {depth} deep"
        )


def _depth_of(value: Any) -> int:
    if not isinstance(value, dict | list | tuple):
        return 0
    return 1 + max(map(_depth_of, value.values() if isinstance(value, dict) else value), default=0)


@dataclass(frozen=True, slots=True)
class _Written:
    """The fields of a ``base.Step`` other than the state."""

    messages: list[Any]
    token_ids: list[Annotated[int, Field(strict=True, ge=0)]]
    is_done: StrictBool
    counts: dict[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$")], FiniteFloat]


def _checked_step(step: Any) -> list[Any]:
    """Return the fields of a step as JSON values; raise ``ValueError`` if it breaks a rule."""
    if not isinstance(step, Step):
        raise ValueError(f"step must return a Step, got {type(step).__name__}")
    check_state(step.state)
    token_ids: Any = step.token_ids
    written = decode(
        _Written,
        {
            "messages": step.messages,
            "token_ids": token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids,
            "is_done": step.is_done,
            "counts": dict(step.counts),
        },
    )
    if written.is_done + bool(written.messages) + bool(written.token_ids) != 1:
        raise ValueError(
            "a step must do one of three things: write messages, write token_ids, or be done"
        )
    messages = [checked_message(message) for message in written.messages]
    values = [messages, written.token_ids, written.is_done, written.counts]
    json.dumps(values, ensure_ascii=False).encode()  # refuses lone surrogates
    return [step.state, *values]
