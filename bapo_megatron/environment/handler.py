"""A worker of an environment: calls the user's class and checks what it returns."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bapo_megatron.environment.base import Step, Task, Turn, UserEnvironment
from bapo_megatron.runtime.names import LoadError, load_named, shown
from bapo_megatron.runtime.worker import settled

_MAX_STATE_BYTES = 1_000_000
"""Largest state, as JSON: every checkpoint holds those of all episodes in progress."""
_MAX_STATE_DEPTH = 100
"""JSON is read and written by recursion, and a state may hold what a model wrote, which may be any
number of brackets."""
_MAX_WRITTEN_BYTES = 500_000

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_BRACKET = re.compile(r"[][{}]")
_MEMORY_REMEDY = "raise rollout.episodes.memory_limit_mb"


def build(name: str) -> EnvironmentHandler:
    """Make the environment.

    Raises:
        LoadError: It cannot be imported or made, or lacks a method.
    """
    try:
        return EnvironmentHandler(name, _load(name))
    except MemoryError as error:
        raise LoadError(f"'{name}' needs more memory than it may have; {_MEMORY_REMEDY}") from error
    except LoadError as error:
        raise LoadError(f"'{name}' {error}") from error


def _load(name: str) -> UserEnvironment:
    named = load_named(name, memory_remedy=_MEMORY_REMEDY, kind="classes")
    if not isinstance(named, type):
        raise LoadError(f"must name a class, got {type(named).__name__}; name a class")
    try:
        environment: UserEnvironment = named()
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        raise LoadError(
            f"must be a class that is made without arguments: {shown(error)}; correct it"
        ) from error
    for method, arguments in (("start", ("task",)), ("step", ("state", "turn"))):
        call = f"{method}({', '.join(arguments)})"
        function = getattr(environment, method, None)
        if not callable(function):
            raise LoadError(f"must have a method {call}; add it")
        try:
            inspect.signature(function).bind(*arguments)
        except (TypeError, ValueError) as error:
            raise LoadError(f"must be callable as {call}: {error}; correct the method") from error
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
            _check_state(state)
            return state
        turn = Turn(**{**request["turn"], "token_ids": tuple(request["turn"]["token_ids"])})
        return _checked_step(settled(self._environment.step(request["state"], turn), self._loop))


def _check_state(state: Any) -> None:
    """Refuse what cannot travel with a sample."""
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the state must be a JSON value ({error})") from error
    if len(text) > _MAX_STATE_BYTES:
        raise ValueError(
            f"the state must be at most {_MAX_STATE_BYTES:,} bytes of JSON, got {len(text):,}"
        )
    brackets = _BRACKET.findall(_STRING.sub("", text))
    depths = itertools.accumulate(1 if bracket in "[{" else -1 for bracket in brackets)
    if (depth := max(depths, default=0)) > _MAX_STATE_DEPTH:
        raise ValueError(f"the state must be nested at most {_MAX_STATE_DEPTH} deep, got {depth}")


def _checked_step(step: Any) -> list[Any]:
    """The fields of a step as JSON values; refuse one that breaks a rule of ``base.Step``."""
    if not isinstance(step, Step):
        raise ValueError(f"step must return a Step, got {type(step).__name__}")
    if not isinstance(step.is_done, bool):
        raise ValueError(f"is_done must be true or false, got {step.is_done!r:.80}")
    _check_state(step.state)
    messages = [_message(message) for message in _items(step.messages, "messages")]
    token_ids = [_token_id(token_id) for token_id in _items(step.token_ids, "token_ids")]
    if messages and token_ids:
        raise ValueError("a step writes either messages or token_ids, got both")
    if step.is_done and (messages or token_ids):
        raise ValueError("a step that is done writes nothing, got messages or token_ids")
    if not (step.is_done or messages or token_ids):
        raise ValueError("a step that is not done must write messages or token_ids, got neither")
    written = json.dumps([messages, token_ids])
    if len(written) > _MAX_WRITTEN_BYTES:
        raise ValueError(
            f"a step writes at most {_MAX_WRITTEN_BYTES:,} bytes of JSON, got {len(written):,}"
        )
    return [step.state, messages, token_ids, step.is_done]


def _items(values: Any, name: str) -> list[Any]:
    is_list = isinstance(values, Sequence) or hasattr(values, "__array__")
    if not is_list or isinstance(values, (str, bytes)):
        raise ValueError(f"{name} must be a list, got {type(values).__name__}")
    return list(values)


def _message(message: Any) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise ValueError(
            f"a message must be a mapping with role and content, got {type(message).__name__}"
        )
    for key in ("role", "content"):
        if key not in message:
            raise ValueError(f"a message must have '{key}', got {list(message)!r:.80}")
    for key, value in message.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ValueError(
                f"a message must hold strings, got {type(value).__name__} as {key!r:.80}"
            )
        try:
            value.encode()
        except UnicodeEncodeError as error:  # half a surrogate pair, which JSON can spell
            raise ValueError(
                f"a message must be UTF-8, got {value!r:.80} as {key!r:.80}"
            ) from error
    return dict(message)


def _token_id(token_id: Any) -> int:
    if isinstance(token_id, bool) or not isinstance(token_id, numbers.Integral) or token_id < 0:
        raise ValueError(f"token_ids must be integers from 0, got {token_id!r:.80}")
    return int(token_id)
