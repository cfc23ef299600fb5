"""Every configuration key with its type, default and description, read from the schema.

Validation errors of the schema as one line: place, key, rule, value, remedy.
"""

from __future__ import annotations

import difflib
import json
import re
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from rich.markup import escape
from rich.table import Table

from bapo_megatron.config.schema import BAPO_PRESETS, BapoConfig, RunConfig
from bapo_megatron.config.section import UNION_TAGS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pydantic import BaseModel, ValidationError
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails
    from rich.console import Console


_BOUNDS: tuple[tuple[Any, str, str], ...] = (
    (annotated_types.Ge, "ge", "≥"),
    (annotated_types.Gt, "gt", ">"),
    (annotated_types.Le, "le", "≤"),
    (annotated_types.Lt, "lt", "<"),
)
_TYPE_NAMES = {int: "integer", float: "number", bool: "true | false", str: "text", Path: "path"}


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """One key of the configuration."""

    name: str
    """Dotted name; ``[]`` stands for each element of a list."""
    type: str
    """Type and limits in words, such as ``integer ≥ 1``."""
    default: str
    """The default as YAML, or ``required``."""
    description: str
    """The schema's own words, on one line."""


def describe_keys(section: type[BaseModel] = RunConfig) -> list[KeyInfo]:
    """List every key of a section, and of those within it, in the schema's order."""
    return _section_keys(section, "")


def print_keys(console: Console) -> None:
    """Print every key of a run as a table."""
    table = Table()
    for heading in ("key", "type", "default", "meaning"):
        table.add_column(heading, overflow="fold")
    for key in describe_keys():
        table.add_row(*map(escape, (key.name, key.type, key.default, key.description)))
    console.print(table)


def nested_section(annotation: Any) -> tuple[type[BaseModel], str] | None:
    """The section that an annotation leads to and how its keys are reached.

    Returns:
        The section with ``.`` (a section or an optional one) or ``[].`` (a list of them), or none.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, "."
    for argument in get_args(annotation):
        found = nested_section(argument)
        if found:
            return found[0], "[]." if get_origin(annotation) is tuple else found[1]
    return None


def _section_keys(section: type[BaseModel], prefix: str) -> list[KeyInfo]:
    keys = []
    for name, field in section.model_fields.items():
        nested = nested_section(field.annotation)
        if nested:
            keys += _section_keys(nested[0], f"{prefix}{name}{nested[1]}")
            continue
        keys.append(
            KeyInfo(
                name=prefix + name,
                type=_type_name(field),
                default=_default(section, prefix + name, field),
                description=" ".join((field.description or "").split()),
            )
        )
    return keys


def _type_name(field: FieldInfo) -> str:
    limits = [
        f"{sign} {getattr(bound, attribute):g}"
        for bound in field.metadata
        for kind, attribute, sign in _BOUNDS
        if isinstance(bound, kind)
    ]
    return " ".join([_annotation_name(field.annotation), *limits])


def _annotation_name(annotation: Any) -> str:
    if annotation in _TYPE_NAMES:
        return _TYPE_NAMES[annotation]
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        return "mapping"
    if get_origin(annotation) is Literal:
        return " | ".join(str(argument) for argument in arguments)
    if get_origin(annotation) in (Union, types.UnionType):
        names = [_annotation_name(a) for a in arguments if a is not type(None)]
        return " | ".join([*names, "null"])
    assert get_origin(annotation) is tuple, f"no words for the type {annotation}"
    return f"list of {_annotation_name(arguments[0])}"


def _default(section: type[BaseModel], key: str, field: FieldInfo) -> str:
    *parents, name = key.split(".")
    if section is BapoConfig and name in BAPO_PRESETS["paper"]:
        return f"{_yaml(BAPO_PRESETS['paper'][name])} (preset paper)"
    if parents and parents[-1] in ("lower", "upper"):
        return f"{_yaml(BAPO_PRESETS['paper'][parents[-1]][name])} (preset paper)"
    if field.default is PydanticUndefined:
        return "required"
    return _yaml(field.default)


def _yaml(value: Any) -> str:
    """A scalar or list as it would stand in a YAML file."""
    if isinstance(value, str) and value:
        return value
    return json.dumps(value)


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
