"""The base of every section of the configuration, and what several sections share."""

import difflib
import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator

from bapo_megatron.runtime.calls import shown_value

MAX_SECONDS = 1e8
"""Limit of every time in the configuration: three years. Waiting functions overflow far beyond."""
MAX_WORKERS = 4096
"""Limit of the processes of one kind on a node."""
MAX_MEMORY_MB = 1 << 30
"""Limit of a process's address space: a pebibyte. The kernel takes no number far beyond."""
MAX_INTEGER = 2**53
"""Limit of every whole number: beyond it, JSON and float64 no longer hold it exactly."""


def _named(path: Any) -> Any:
    if isinstance(path, str) and not path.strip():  # it would be the current directory
        raise ValueError("must be a path, got ''; name one (is a variable not set?)")
    return path


HomePath = Annotated[
    Path,
    BeforeValidator(_named),
    AfterValidator(lambda path: Path(os.path.expanduser(path))),  # noqa: PTH111
]
"""A path in which ``~`` is the user's home directory."""

AbsolutePath = Annotated[HomePath, AfterValidator(Path.absolute)]
"""A path that is made absolute when read, since user code may change the working directory.
Symbolic links stay."""

SET_TAG, LIST_TAG = "<set>", "<list>"
"""Tags that validation inserts into the location of a value that is a section or a list of them."""

_DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_NAMED_OBJECT = re.compile(f"{_DOTTED}:{_DOTTED}")


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    @model_validator(mode="after")
    def _values_can_be_used(self) -> Self:
        for name, value in self:
            if isinstance(value, float) and name.endswith("_s") and value > MAX_SECONDS:
                raise ValueError(f"{name} must be at most {MAX_SECONDS:g} s, got {value}; lower it")
            if isinstance(value, int) and abs(value) > MAX_INTEGER:
                raise ValueError(f"{name} must be at most 2^53 in size, got {value:g}; lower it")
        return self


def with_values[SectionT: Section](section: SectionT, **values: Any) -> SectionT:
    """Return a copy of a section with other values; a dict has those of a section in it."""
    update = {
        name: with_values(getattr(section, name), **value) if isinstance(value, dict) else value
        for name, value in values.items()
    }
    return section.model_copy(update=update)


def is_named_object(name: str) -> bool:
    """Return whether a value has the form ``package.module:object``."""
    return _NAMED_OBJECT.fullmatch(name) is not None


def built_in_or_own(
    built_in: tuple[str, ...], kind: str, remedies: Mapping[str, str] = MappingProxyType({})
) -> AfterValidator:
    """Accept the names ``built_in`` and ``package.module:object``, which messages call ``kind``.

    ``remedies`` answer wrong names that are common; for others the nearest name is suggested.
    """

    def check(name: str | None) -> str | None:
        if name is None or name in built_in or is_named_object(name):
            return name
        allowed = f"{', '.join(built_in)} or package.module:{kind}"
        remedy = "correct it" if ":" in name else f"put a colon before the {kind.lower()}'s name"
        for near in difflib.get_close_matches(name, built_in, n=1):
            remedy = f"did you mean '{near}'?"
        remedy = remedies.get(name.lower(), remedy)
        raise ValueError(f"must be {allowed}, got {shown_value(name)}; {remedy}")

    return AfterValidator(check)


def split_address(address: str) -> SplitResult | None:
    """Return the parts of an ``http://`` or ``https://`` address; None if it is not one."""
    try:
        parts = urlsplit(address)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number or above 65535, or an open bracket
        return None
    is_one_word = address.isprintable() and " " not in address
    return parts if has_host and is_one_word and parts.scheme in ("http", "https") else None


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is this machine's loopback, by address or by name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
