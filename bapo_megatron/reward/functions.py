"""Reward functions by name: the built-in ones, and ``package.module:function``.

Only worker processes load and call them.
"""

from __future__ import annotations

import inspect
import math
import numbers
import re
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bapo_megatron.names import LoadError, load_named
from bapo_megatron.reward.base import Result, RewardFunction, SampleFacts, Score

if TYPE_CHECKING:
    import asyncio

PARAMETERS = ("response", "answer", "sample", "row")
"""What a function may ask for, by the names of its parameters."""

_LONGEST_TEXT = 200
_MOST_METRICS = 32
_METRIC_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


BUILT_IN = {"math": "bapo_megatron.reward.math_answer:grade_math_answer"}
"""Functions that have a name of their own."""


@dataclass(frozen=True, slots=True)
class LoadedFunction:
    """A reward function and what it asks for."""

    name: str
    function: RewardFunction
    parameters: tuple[str, ...]

    def __call__(
        self,
        loop: asyncio.AbstractEventLoop,
        response: str,
        answer: str,
        sample: SampleFacts,
        row: Mapping[str, Any],
    ) -> Score:
        """Score one response; runs the function's coroutine, if it returns one, in ``loop``."""
        given = {"response": response, "answer": answer, "sample": sample, "row": row}
        result = self.function(**{name: given[name] for name in self.parameters})
        if inspect.isawaitable(result):
            result = loop.run_until_complete(_wait(result))
        return as_score(result)


async def _wait(result: Awaitable[Result]) -> Result:
    return await result


def load(name: str) -> LoadedFunction:
    """Find a function and check that it can be called.

    Args:
        name: A key of ``BUILT_IN``, or ``package.module:function``.

    Raises:
        LoadError: It is not there, cannot be imported, or asks for something unknown.
    """
    function = load_named(BUILT_IN.get(name, name), memory_remedy="raise reward.memory_limit_mb")
    if not callable(function):
        raise LoadError(
            f"must name a function, got {type(function).__name__}; name a function of the module"
        )
    return LoadedFunction(name, function, _parameters(function))


def _parameters(function: RewardFunction) -> tuple[str, ...]:
    """Which of ``PARAMETERS`` to pass, by keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise LoadError(f"its parameters cannot be read ({error}); write it in Python") from error
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return PARAMETERS
    names = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    needed = [p.name for p in parameters if p.default is p.empty and p.name in names]
    unknown = [name for name in needed if name not in PARAMETERS] + positional
    if unknown:
        raise LoadError(
            f"asks for '{unknown[0]}', but is called with {', '.join(PARAMETERS)} by name; rename "
            "the parameter, or give it a default"
        )
    return tuple(name for name in PARAMETERS if name in names)


def as_score(result: Any) -> Score:
    """Any allowed return value as a ``Score``.

    Raises:
        ValueError: It is none of ``base.Result``, or holds a number that is not finite.
    """
    if isinstance(result, Score):
        checked = {name: _number(value, name) for name, value in _metrics(result.metrics)}
        return replace(
            result,
            reward=_number(result.reward, "reward"),
            answer_found=bool(result.answer_found),
            extracted=str(result.extracted)[:_LONGEST_TEXT],
            timed_out=bool(result.timed_out),
            reason=str(result.reason)[:_LONGEST_TEXT],
            failed=bool(result.failed),
            metrics=checked,
            components={},
        )
    if isinstance(result, Mapping):
        return _from_mapping(result)
    return Score(reward=_number(result, "reward"))


def _from_mapping(result: Mapping[str, Any]) -> Score:
    if "reward" not in result:
        raise ValueError(f"it returned a mapping without 'reward' (keys: {_keys(result)}); add it")
    others = {
        name: value
        for name, value in result.items()
        if name not in ("reward", "extracted", "reason", "answer_found")
    }
    return Score(
        reward=_number(result["reward"], "reward"),
        answer_found=bool(result.get("answer_found", True)),
        extracted=str(result.get("extracted", ""))[:_LONGEST_TEXT],
        reason=str(result.get("reason", ""))[:_LONGEST_TEXT],
        metrics={name: _number(value, name) for name, value in _metrics(others)},
    )


def _metrics(metrics: Mapping[str, Any]) -> list[tuple[str, Any]]:
    if len(metrics) > _MOST_METRICS:
        raise ValueError(f"it returned {len(metrics)} metrics, at most {_MOST_METRICS} are kept")
    for name in metrics:
        if not isinstance(name, str) or _METRIC_NAME.fullmatch(name) is None:
            raise ValueError(f"metric names must be letters, digits and . _ -, got {name!r:.80}")
    return list(metrics.items())


def _number(value: Any, name: str) -> float:
    if not isinstance(value, numbers.Real) and not hasattr(value, "__float__"):
        raise ValueError(f"'{name}' must be a number, got {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"'{name}' must be finite, got {number}")
    return number


def _keys(result: Mapping[str, Any]) -> str:
    return ", ".join(map(str, list(result)[:5])) or "none"
