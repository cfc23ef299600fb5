"""Every configuration key with its type, default and description, read from the schema."""

from __future__ import annotations

import json
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

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
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
