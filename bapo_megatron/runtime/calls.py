"""Typed calls from one process to another, one JSON object per line.

A ``Call`` has a request and a response type: frozen dataclasses or plain values. One side starts
calls (``Caller``), the other binds a function to each (``Answers``). Both use the same records, so
mypy finds a field that is renamed on one side only. On the wire:

    → {"id": 1, "call": "collect", "arguments": 1}
    ← {"progress": "rollout 1: 3/8 groups, 1200 tokens/s"}
    ← {"id": 1, "result": "…/step_000001.parquet"}

or ``{"id": 1, "error": "one line with a remedy"}``; a ``{"warning": "…"}`` may come at any time.
"""

import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, to_jsonable_python
from typing_extensions import TypeForm

_LONG_VALUE = re.compile(r"(\S{300})\S+?(?=['\";:,]*(?:\s|$))")
_INNER_SPACE = re.compile(r"(?<=\S)\s+(?=\S)")
_MAX_SHOWN = 80
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


@dataclass(frozen=True, slots=True)
class Call[RequestT, ResponseT]:
    """A call: its name, request and response types."""

    name: str
    request: TypeForm[RequestT]
    response: TypeForm[ResponseT]


class Caller(Protocol):
    """Starts calls on the other process."""

    def start[RequestT, ResponseT](
        self, call: Call[RequestT, ResponseT], request: RequestT, /
    ) -> Callable[[], ResponseT]:
        """Start a call; the returned function waits for the response.

        It raises ``RolloutError`` if the call fails.
        """
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """A call on the wire."""

    id: int
    call: str
    arguments: Any
    """The call's request; on the answering side JSON values, which ``Answers`` decodes."""


@dataclass(frozen=True, slots=True)
class Result:
    """The response to a call; on the calling side JSON values, not decoded yet."""

    id: int
    result: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed call: what happened, and a remedy."""

    id: int
    error: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a call, for people."""

    progress: str


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning that the user should see."""

    warning: str


Reply = Result | Failure | Progress | Notice
"""What the answering side sends; the types differ in their fields."""


class Answers:
    """The functions that answer calls."""

    def __init__(self) -> None:
        self._bound: dict[str, tuple[TypeForm[Any], Callable[[Any], Awaitable[Any]]]] = {}

    def bind[RequestT, ResponseT](
        self, call: Call[RequestT, ResponseT], answer: Callable[[RequestT], Awaitable[ResponseT]]
    ) -> None:
        """Answer a call with ``answer``."""
        self._bound[call.name] = (call.request, answer)

    async def answer(self, request: Request) -> Any:
        """Return the response to a call; pass on what its function raises.

        Raises:
            ValueError: The arguments do not fit the call's request.
        """
        kind, answer = self._bound[request.call]
        return await answer(decode(kind, request.arguments))


def encode(message: Request | Reply) -> bytes:
    """Encode a message, and the records in it, as one line."""
    # Not to_json, which refuses lone surrogates: a model's text may have some.
    return json.dumps(to_jsonable_python(message)).encode() + b"\n"


def decode[ResponseT](kind: TypeForm[ResponseT], values: Any) -> ResponseT:
    """Build a record from JSON values.

    Raises:
        ValueError: They do not fit; the message names the first field, its rule and its value.
    """
    try:
        record: ResponseT = _adapter(kind).validate_python(values)
    except ValidationError as error:
        raise ValueError(describe_invalid(error)) from error
    return record


def decode_json[ResponseT](kind: TypeForm[ResponseT], content: bytes) -> ResponseT:
    """Build a record from JSON text with exactly the types of its fields; raise as ``decode``."""
    try:
        record: ResponseT = _adapter(kind).validate_json(content, strict=True)
    except ValidationError as error:
        raise ValueError(describe_invalid(error)) from error
    return record


def decode_lines[RecordT](kind: TypeForm[RecordT], content: bytes, path: Path) -> list[RecordT]:
    """Build a record from each line of a file, as ``decode_json``; errors name file and line."""
    records = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            records.append(decode_json(kind, line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}; remove the line") from error
    return records


def dotted(location: Sequence[int | str]) -> str:
    """Return the path of a value for messages: ``eval.sets[0].path``."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).removeprefix(".")


def shown_value(value: Any) -> str:
    """Return a value for a message, printable on one line: as JSON, truncated if long."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    shown = _INNER_SPACE.sub(" ", text[:_MAX_SHOWN]) + ("…" if len(text) > _MAX_SHOWN else "")
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in shown)
    return f"'{shown}'" if isinstance(value, str) else shown


def cut_long_values(text: str) -> str:
    """Return a message without the rest of words of more than 300 characters."""
    return _LONG_VALUE.sub(r"\1…", text)


def rule_of(details: ErrorDetails) -> str:
    """Return the rule that a pydantic error is about: ``must be …``."""
    if details["type"] == "tuple_type":
        return "must be a list"
    if details["type"] == "dataclass_type":
        return "must be an object"
    rule = re.sub(r"^\w+ should ", "must ", details["msg"])
    rule = re.sub(r"\b10{20,}\b", lambda digits: f"1e+{len(digits[0]) - 1}", rule)
    return rule.replace(" valid ", " ").replace("a int", "an int")


def describe_invalid(error: ValidationError) -> str:
    """Return path, rule and value of the first field that does not fit its record."""
    details = error.errors()[0]
    if details["type"] == "json_invalid":
        return f"not valid JSON ({details['msg'].removeprefix('Invalid JSON: ')})"
    place = f"'{dotted(details['loc'])}' " if details["loc"] else ""
    if details["type"] == "missing":
        return f"{place}is missing"
    if details["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{place}is an unknown field"
    return f"{place}{rule_of(details)}, got {shown_value(details['input'])}"
