"""Reward functions by name, in the worker processes that load and call them.

A name is a key of ``BUILT_IN``, ``package.module:function`` or ``package.module:Class.method``.
What a function may ask for and return is in ``base``.
"""

import asyncio
import inspect
import math
import numbers
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, NamedTuple

from bapo_megatron.reward.base import GroupFunction, RewardFunction, SampleFacts, Score
from bapo_megatron.reward.extraction import has_closed_box
from bapo_megatron.runtime.names import LoadError, load_named
from bapo_megatron.runtime.worker import settled

BUILT_IN = {"math": "bapo_megatron.reward.math_answer:grade_math_answer"}
"""Where the functions of ``config.reward.BUILT_IN_FUNCTIONS`` are."""
PARAMETERS = ("response", "answer", "sample", "row", "turns", "state")
"""What a function of one response may ask for, by the names of its parameters."""
GROUP_PARAMETERS = ("responses", "samples", "states", "rewards", "answer", "row")
"""What a function of a whole group may ask for."""

_SHARED = ("answer", "row")
_MAX_TEXT = 200
_MAX_METRICS = 32
_METRIC_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


def build(*names: str) -> "RewardHandler":
    """Load the functions, or raise ``LoadError`` for one that cannot be loaded."""
    functions = {}
    for name in names:
        try:
            functions[name] = load(name)
        except LoadError as error:
            raise LoadError(f"{label(name)} {error}") from error
    return RewardHandler(functions)


def label(*names: str) -> str:
    """Return what messages call these functions."""
    return f"reward function{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"


class LoadedFunction(NamedTuple):
    """A reward function and what it asks for."""

    function: RewardFunction | GroupFunction
    parameters: tuple[str, ...]
    sees_groups: bool
    """Whether it scores the responses to a prompt together."""


class RewardHandler:
    """Answers the requests of a ``RewardPool``."""

    def __init__(self, functions: Mapping[str, LoadedFunction]) -> None:
        """Keep the functions, by their names."""
        self._functions = functions
        self._loop = asyncio.new_event_loop()

    @property
    def facts(self) -> list[str]:
        """The functions that see whole groups."""
        return [name for name, function in self._functions.items() if function.sees_groups]

    def name(self, request: Mapping[str, Any]) -> str:
        """See ``worker.Handler``."""
        return "reward.format" if "pattern" in request else label(request["function"])

    def answer(self, request: Mapping[str, Any]) -> Any:
        """Return a score for each response, or whether a pattern was found."""
        if "pattern" in request:
            pattern, text = request["pattern"], request["text"]
            return has_closed_box(text) if pattern is None else bool(re.search(pattern, text))
        loaded = self._functions[request["function"]]
        responses, rewards = request["responses"], request["rewards"]
        samples = [SampleFacts(**response["sample"]) for response in responses]
        given = {"answer": request["answer"], "row": request["row"]}
        if rewards is not None:
            given["responses"] = [response["text"] for response in responses]
            given["samples"] = samples
            given["states"] = [response["state"] for response in responses]
            given["rewards"] = rewards
            results = self._call(loaded, given)
            _check_group(results, len(responses))
        elif loaded.sees_groups:
            raise ValueError(
                f"it asks for {', '.join(loaded.parameters)}: it scores a whole group of "
                "responses, and was given one"
            )
        else:
            [response] = responses
            given["response"] = response["text"]
            given["sample"] = samples[0]
            given["turns"] = response["turns"] or [response["text"]]
            given["state"] = response["state"]
            results = [self._call(loaded, given)]
        return [asdict(as_score(result)) for result in results]

    def _call(self, loaded: LoadedFunction, given: Mapping[str, Any]) -> Any:
        asked = {name: given[name] for name in loaded.parameters}
        return settled(loaded.function(**asked), self._loop)


def _check_group(results: Any, num_responses: int) -> None:
    if isinstance(results, (str, Mapping)) or not hasattr(results, "__len__"):
        raise ValueError(
            f"it must return a list with one reward for each response, got {type(results).__name__}"
        )
    if len(results) != num_responses:
        raise ValueError(
            f"it must return one reward for each of {num_responses} responses, got {len(results)}"
        )


def load(name: str) -> LoadedFunction:
    """Find a function and check that it can be called; raise ``LoadError`` where it cannot."""
    function = load_named(BUILT_IN.get(name, name), memory_remedy="raise reward.memory_limit_mb")
    if not callable(function):
        raise LoadError(
            f"must name a function, got {type(function).__name__}; name a function of the module"
        )
    parameters = _parameters(function)
    return LoadedFunction(function, parameters, any(name not in PARAMETERS for name in parameters))


def _parameters(function: RewardFunction | GroupFunction) -> tuple[str, ...]:
    """Which of ``PARAMETERS`` or ``GROUP_PARAMETERS`` to pass, by keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise LoadError(f"its parameters cannot be read ({error}); write it in Python") from error
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = [p.name for p in named]
    of_groups = [name for name in names if name in GROUP_PARAMETERS and name not in _SHARED]
    of_one = [name for name in names if name in PARAMETERS and name not in _SHARED]
    if of_groups and of_one:
        raise LoadError(
            f"asks for '{of_one[0]}' of one response and for '{of_groups[0]}' of a group; ask for "
            "one kind, and write two functions if you need both"
        )
    known = GROUP_PARAMETERS if of_groups else PARAMETERS
    unknown = [p.name for p in named if p.default is p.empty and p.name not in known]
    unknown += [p.name for p in named if p.kind is p.POSITIONAL_ONLY]
    if unknown:
        raise LoadError(
            f"asks for '{unknown[0]}', but is called with {', '.join(known)} by name; rename the "
            "parameter, or give it a default"
        )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return known if takes_all else tuple(name for name in known if name in names)


def as_score(result: Any) -> Score:
    """Return any allowed return value as a ``Score``.

    Raises:
        ValueError: It is none of ``base.Result``, or holds a number that is not finite.
    """
    if isinstance(result, Score):
        said = {field.name: getattr(result, field.name) for field in fields(result)}
        metrics = result.metrics
    elif isinstance(result, Mapping):
        if "reward" not in result:
            keys = ", ".join(map(str, list(result)[:5])) or "none"
            raise ValueError(f"it returned a mapping without 'reward' (keys: {keys}); add it")
        names = ("reward", "extracted", "reason", "answer_found")
        said = {name: result[name] for name in names if name in result}
        metrics = {name: value for name, value in result.items() if name not in names}
    else:
        said, metrics = {"reward": result}, {}
    return Score(
        reward=_number(said["reward"], "reward"),
        answer_found=bool(said.get("answer_found", True)),
        extracted=str(said.get("extracted", ""))[:_MAX_TEXT],
        timed_out=bool(said.get("timed_out", False)),
        reason=str(said.get("reason", ""))[:_MAX_TEXT],
        metrics=_metrics(metrics),
        failed=bool(said.get("failed", False)),
    )


def _metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    if len(metrics) > _MAX_METRICS:
        raise ValueError(f"it returned {len(metrics)} metrics, at most {_MAX_METRICS} are allowed")
    for name in metrics:
        if not isinstance(name, str) or _METRIC_NAME.fullmatch(name) is None:
            raise ValueError(f"metric names must be letters, digits and . _ -, got {name!r:.80}")
    return {name: _number(value, name) for name, value in metrics.items()}


def _number(value: Any, name: str) -> float:
    if not isinstance(value, numbers.Real) and not hasattr(value, "__float__"):
        raise ValueError(f"'{name}' must be a number, got {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"'{name}' must be finite, got {number}")
    return number
