"""Configuration keys as the schema describes them, and validation errors as one line."""

import difflib
import json
import re
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.section import LIST_TAG, SET_TAG, AbsolutePath
from bapo_megatron.runtime.calls import cut_long_values, dotted, rule_of, shown_value

_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
"""Limits as the metadata of a field name them."""
_TYPE_NAMES = {
    int: "integer",
    float: "number",
    bool: "true | false",
    str: "text",
    Path: "path",
    AbsolutePath: "path",
}


class KeyInfo(NamedTuple):
    """One key of the configuration, in words."""

    name: str
    """Dotted name; ``[]`` stands for each element of a list."""
    type: str
    """Type and limits, such as ``integer ≥ 1``."""
    default: str
    """The default as YAML, or ``required``."""
    description: str


def describe_keys(
    section: type[BaseModel] = RunConfig, prefix: str = "", defaults: BaseModel | None = None
) -> list[KeyInfo]:
    """List every key of a section and its subsections, in the schema's order.

    ``defaults`` holds the section's values where it is left out.
    """
    keys = []
    for name, field in section.model_fields.items():
        default = field.default if defaults is None else getattr(defaults, name)
        if nested := _nested_section(field.annotation):
            inner_defaults = default if isinstance(default, nested[0]) else None
            keys += describe_keys(nested[0], f"{prefix}{name}{nested[1]}", inner_defaults)
            continue
        description = " ".join((field.description or "").split())
        default_text = "required" if default is PydanticUndefined else _yaml(default)
        keys.append(KeyInfo(prefix + name, _type_name(field), default_text, description))
    return keys


def _nested_section(annotation: Any) -> tuple[type[BaseModel], str] | None:
    """The section that an annotation leads to, with ``.``, or ``[].`` for a list of sections."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, "."
    for argument in get_args(annotation):
        if nested := _nested_section(argument):
            return nested[0], "[]." if get_origin(annotation) is tuple else nested[1]
    return None


def _type_name(field: FieldInfo) -> str:
    limits = [
        f"{sign} {number if isinstance(number, int) else format(number, 'g')}"
        for bound in field.metadata
        for limit, sign in _SIGNS.items()
        if (number := getattr(bound, limit, None)) is not None
    ]
    return " ".join([_annotation_name(field.annotation), *limits])


def _annotation_name(annotation: Any) -> str:
    if annotation in _TYPE_NAMES:
        return _TYPE_NAMES[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _annotation_name(arguments[0])
    if origin is dict:
        return "mapping"
    if origin is Literal:
        return " | ".join(str(argument) for argument in arguments)
    if origin in (Union, types.UnionType):
        names = [_annotation_name(a) for a in arguments if a is not type(None)]
        return " | ".join([*names, "null"])
    assert origin is tuple, f"no words for the type {annotation}"
    return f"list of {_annotation_name(arguments[0])}"


def _yaml(value: Any) -> str:
    text = str(value) if isinstance(value, Path) else value
    return text if isinstance(text, str) and text else json.dumps(text)


Place = str | Callable[[Sequence[int | str]], str]
"""The file or option that holds the values, or a function to find it by the path of a key."""


def explain(error: ValidationError, root: type[BaseModel], place: Place) -> str:
    """Describe the error that most likely caused the others: place, key, rule, value, remedy."""
    # A misspelt key also leaves the right one missing: report what is there before what is not.
    rank = {"extra_forbidden": 0, "missing": 2}
    details = min(error.errors(), key=lambda entry: rank.get(entry["type"], 1))
    location = tuple(part for part in details["loc"] if part not in (SET_TAG, LIST_TAG))
    place = place if isinstance(place, str) else place(location)
    key = dotted(location)
    if details["type"] == "extra_forbidden":
        is_section = isinstance(details["input"], dict)
        return f"{place}: unknown key '{key}'; {_suggestion(location, root, is_section)}"
    key_info = find_key(key, root)
    if details["type"] == "missing":
        return f"{place}: missing key '{key}'; add it"
    if details["type"] == "value_error":
        rule = cut_long_values(str(details["ctx"]["error"]))
        rule = rule if ";" in rule else f"{rule}; correct it"
        # A rule of a section begins with the key in it that the rule is about.
        name, _, rest = rule.partition(" ")
        inner_key = dotted((*location, name))
        if find_key(inner_key, root):
            return f"{place}: '{inner_key}' {rest}"
        return f"{place}: '{key}' {rule}" if key else f"{place}: {rule}"
    rule, remedy = rule_of(details), "correct it"
    if details["type"] in ("model_type", "model_attributes_type"):
        rule, remedy = "must be a section of keys", "indent its keys below it, or leave it out"
    elif key_info is not None and key_info.default != "required":
        remedy = f"its default is {key_info.default}"
    return f"{place}: '{key}' {rule}, got {shown_value(details['input'])}; {remedy}"


def find_key(key: str, root: type[BaseModel]) -> KeyInfo | None:
    """Return a key's entry; a value that is a section or a list of them is listed as a section."""
    names = (re.sub(r"\[\d+\]", "[]", key), re.sub(r"\[\d+\]", "", key))
    return next((key_info for key_info in describe_keys(root) if key_info.name in names), None)


def _suggestion(location: Sequence[int | str], root: type[BaseModel], is_section: bool) -> str:
    """What an unknown key may have meant: the nearest of its section, else of any section.

    A section is never taken for a key with a single value.
    """
    *parents, unknown = location
    section = root
    for part in parents:
        if not isinstance(part, int):
            nested = _nested_section(section.model_fields[part].annotation)
            assert nested is not None, "only sections refuse unknown keys"
            section = nested[0]
    key_names = [key.name for key in describe_keys(root)]
    nearby = {
        name: dotted([*parents, name])
        for name, field in section.model_fields.items()
        if not is_section or _nested_section(field.annotation)
    }
    anywhere = {name.rpartition(".")[2]: name for name in reversed(key_names)}
    for candidates, cutoff in ((nearby, 0.6), ({} if is_section else anywhere, 0.75)):
        for near in difflib.get_close_matches(str(unknown), candidates, 1, cutoff):
            return f"did you mean '{candidates[near]}'?"
    return f"its section's keys: {', '.join(section.model_fields)}"
