"""Reward functions by name, in the worker processes that load and call them.

A name is ``math``, ``math_verify``, ``program``, ``gym``, ``package.module:function`` or
``package.module:Class.method``; ``base`` defines arguments and results.
"""

import asyncio
import inspect
import math
import numbers
import re
import traceback
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, NamedTuple

from bapo_megatron.config.reward import ProgramConfig
from bapo_megatron.reward.base import GroupFunction, RewardFunction, RowError, SampleFacts, Score
from bapo_megatron.reward.extraction import last_boxed
from bapo_megatron.runtime.names import LoadError, load_named
from bapo_megatron.runtime.worker import settled
from bapo_megatron.sandbox.base import SandboxError

BUILT_IN = {
    "math": "bapo_megatron.reward.math_answer:grade_math_answer",
    "math_verify": "bapo_megatron.reward.math_verify_grader:grade_by_math_verify",
}
"""Location of functions that always load."""
PROGRAM = "program"
_GYM = {"gym": "bapo_megatron.reward.gym:grade"}
GRADERS = frozenset({*BUILT_IN, *_GYM, PROGRAM})
"""The built-in functions: no response makes them fail."""
PARAMETERS = ("response", "answer", "sample", "row", "turns", "state")
"""Names of the parameters that a function of one response may have."""
GROUP_PARAMETERS = ("responses", "samples", "states", "rewards", "answer", "row")
"""Names of the parameters that a function of a whole group may have."""

_SHARED = ("answer", "row")
_MAX_TEXT = 200
_MAX_METRICS = 32
_TRACEBACK_LIMIT = -20
"""Negative: the innermost frames are kept."""
_METRIC_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


def build(program: Mapping[str, Any], *names: str) -> "RewardHandler":
    """Load the functions, or raise ``LoadError`` for one that cannot be loaded.

    ``program`` holds the values of a ``ProgramConfig``.
    """
    functions = {}
    for name in names:
        try:
            functions[name] = load(name, ProgramConfig.model_validate(program))
        except LoadError as error:
            raise LoadError(f"{label(name)} {error}") from error
    return RewardHandler(functions)


def label(*names: str) -> str:
    """Return the functions' name in messages."""
    return f"reward function{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"


class LoadedFunction(NamedTuple):
    """A reward function and its parameters."""

    function: RewardFunction | GroupFunction
    parameters: tuple[str, ...]
    sees_groups: bool


class RewardHandler:
    """Answers the requests of a ``RewardPool``."""

    def __init__(self, functions: Mapping[str, LoadedFunction]) -> None:
        """Keep the functions, by their names."""
        self._functions = functions
        self._loop = asyncio.new_event_loop()
        self._shown_places: set[str] = set()

    @property
    def facts(self) -> list[str]:
        """The functions of whole groups."""
        return [name for name, function in self._functions.items() if function.sees_groups]

    def name(self, request: Mapping[str, Any]) -> str:
        """See ``worker.Handler``."""
        return "reward.format" if "pattern" in request else label(request["function"])

    def answer(self, request: Mapping[str, Any]) -> Any:
        """Return a score for each response, or whether a pattern matches."""
        if "pattern" in request:
            pattern, text = request["pattern"], request["text"]
            return bool(last_boxed(text)) if pattern is None else bool(re.search(pattern, text))
        loaded = self._functions[request["function"]]
        responses, rewards = request["responses"], request["rewards"]
        samples = [SampleFacts(**response["sample"]) for response in responses]
        arguments = {"answer": request["answer"], "row": request["row"]}
        if rewards is not None:
            arguments["responses"] = [response["text"] for response in responses]
            arguments["samples"] = samples
            arguments["states"] = [response["state"] for response in responses]
            arguments["rewards"] = rewards
            results = self._call(loaded, arguments)
            _check_group(results, len(responses))
        elif loaded.sees_groups:
            raise ValueError(
                f"it asks for {', '.join(loaded.parameters)}: it scores whole groups of responses, "
                "got one"
            )
        else:
            [response] = responses
            arguments["response"] = response["text"]
            arguments["sample"] = samples[0]
            arguments["turns"] = response["turns"] or [response["text"]]
            arguments["state"] = response["state"]
            return [asdict(self._score(request["function"], loaded, arguments))]
        return [asdict(as_score(result)) for result in results]

    def _score(self, name: str, loaded: LoadedFunction, arguments: Mapping[str, Any]) -> Score:
        """The score of one response; 0, with a traceback in the log, where a built-in one fails.

        Only a row or a sandbox may fail a built-in grader, and the memory limit, which ends the
        worker.
        """
        try:
            return as_score(self._call(loaded, arguments))
        except (MemoryError, RowError, SandboxError):
            raise
        except Exception as error:
            if name not in GRADERS:
                raise
            place = str(traceback.extract_tb(error.__traceback__)[-1])
            if place not in self._shown_places:  # thousands may fail there
                self._shown_places.add(place)
                traceback.print_exception(error, limit=_TRACEBACK_LIMIT)
            return Score(0.0, answer_found=False, reason="error", failed=True)

    def _call(self, loaded: LoadedFunction, arguments: Mapping[str, Any]) -> Any:
        keywords = {name: arguments[name] for name in loaded.parameters}
        return settled(loaded.function(**keywords), self._loop)


def _check_group(results: Any, num_responses: int) -> None:
    is_list = hasattr(results, "__len__") and not isinstance(results, (str, Mapping))
    if not is_list or len(results) != num_responses:
        size = len(results) if is_list else type(results).__name__
        raise ValueError(
            f"it must return a list with one reward for each of {num_responses} responses, got "
            f"{size}"
        )


def load(name: str, program: ProgramConfig) -> LoadedFunction:
    """Find a function and check that it can be called; raise ``LoadError`` where it cannot."""
    if name == PROGRAM:
        from bapo_megatron.reward.program import ProgramGrader

        function = ProgramGrader(program).grade
    else:
        function = load_named(
            (BUILT_IN | _GYM).get(name, name), memory_remedy="raise reward.memory_limit_mb"
        )
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
        values = {field.name: getattr(result, field.name) for field in fields(result)}
        metrics = result.metrics
    elif isinstance(result, Mapping):
        if "reward" not in result:
            raise ValueError(f"it returned a mapping without 'reward': {result!s:.80}; add it")
        names = ("reward", "extracted", "reason", "answer_found")
        values = {name: result[name] for name in names if name in result}
        metrics = {name: value for name, value in result.items() if name not in names}
        values.setdefault("answer_found", values.get("extracted") != "")
    else:
        values, metrics = {"reward": result}, {}
    return Score(
        reward=_number(values["reward"], "reward"),
        answer_found=bool(values.get("answer_found", True)),
        extracted=str(values.get("extracted", ""))[:_MAX_TEXT],
        timed_out=bool(values.get("timed_out", False)),
        reason=str(values.get("reason", ""))[:_MAX_TEXT],
        metrics=_metrics(metrics),
        failed=bool(values.get("failed", False)),
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
