"""Validation errors of the schema as one line: place, key, rule, value, remedy."""

from __future__ import annotations

import difflib
import json
import re
from typing import TYPE_CHECKING, Any

from bapo_megatron.config.describe import describe_keys, nested_section
from bapo_megatron.config.section import UNION_TAGS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

_LONGEST_VALUE = 80
_SECTION_ERRORS = ("model_type", "model_attributes_type")


def explain(
    error: ValidationError, root: type[BaseModel], place_of: Callable[[Sequence[int | str]], str]
) -> str:
    """Describe the error that most likely caused the others.

    Args:
        error: What validation of ``root`` raised.
        root: The outermost section.
        place_of: File or option that holds the key with this path.
    """
    # A misspelt key also leaves the right one missing: report what is there before what is not.
    rank = {"extra_forbidden": 0, "missing": 2}
    details = min(error.errors(), key=lambda entry: rank.get(entry["type"], 1))
    location = tuple(part for part in details["loc"] if part not in UNION_TAGS)
    place, key = place_of(location), _dotted(location)
    if details["type"] == "extra_forbidden":
        return f"{place}: unknown key '{key}'; {_suggestion(location, root)}"
    generic_key = re.sub(r"\[\d+\]", "[]", key)
    # Keys of what is one section or a list of them are listed as those of one.
    names = (generic_key, re.sub(r"\[\d*\]", "", key))
    known = next((k for k in describe_keys(root) if k.name in names), None)
    if details["type"] == "missing":
        about = f" ({known.description})" if known else ""
        return f"{place}: missing key '{key}'{about}; add it"
    if details["type"] == "value_error":
        subject = f"'{key}' " if key else ""
        return f"{place}: {subject}{details['ctx']['error']}"
    problem = f"{place}: '{key}' {_rule(details)}, got {_shown(details['input'])}"
    if details["type"] in _SECTION_ERRORS:
        return f"{problem}; indent its keys below it, or leave it out"
    if details["type"] == "string_type":
        return f"{problem}; quote it to make it a text"
    if known is None or known.default == "required":
        return problem
    return f"{problem}; its default is {known.default}"


def _dotted(location: Sequence[int | str]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).removeprefix(".")


def _suggestion(location: Sequence[int | str], root: type[BaseModel]) -> str:
    """What an unknown key may have meant: a key of its section, else one of any section."""
    wanted = str(location[-1])
    section = root
    for part in location[:-1]:
        if not isinstance(part, int):
            nested = nested_section(section.model_fields[part].annotation)
            assert nested is not None, "only sections refuse unknown keys"
            section = nested[0]
    near = difflib.get_close_matches(wanted, section.model_fields, n=1)
    if near:
        return f"did you mean '{_dotted([*location[:-1], near[0]])}'?"
    for known in describe_keys(root):
        if known.name.rpartition(".")[2] == wanted:
            return f"did you mean '{known.name}'?"
    return f"known here: {', '.join(section.model_fields)}"


def _rule(details: ErrorDetails) -> str:
    """Pydantic's message as a rule: ``must be …``."""
    if details["type"] in _SECTION_ERRORS:
        return "must be a section of keys"
    if details["type"] == "tuple_type":
        return "must be a list"
    return (
        re.sub(r"^\w+ should ", "must ", details["msg"])
        .replace(" valid ", " ")
        .replace("a int", "an int")
    )


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    shown = f"'{text}'" if isinstance(value, str) else text
    return shown if len(shown) <= _LONGEST_VALUE else shown[:_LONGEST_VALUE] + "…"
