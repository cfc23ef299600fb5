"""The base of every section of the configuration, and what several sections share."""

import re

from pydantic import BaseModel, ConfigDict

SET_TAG, LIST_TAG = "<set>", "<list>"
"""What validation puts between the keys of a value that is one section or a list of them."""

_DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_NAMED_OBJECT = re.compile(f"{_DOTTED}:{_DOTTED}")


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


def built_in_or_own(name: str, built_in: tuple[str, ...], own: str, remedy: str = "") -> str:
    """Return ``name`` if it is built in, or has the form ``package.module:object``.

    Args:
        name: The value of a key.
        built_in: Names that need no module.
        own: The form in the message, such as ``package.module:Class``.
        remedy: End of the message.

    Raises:
        ValueError: It is neither.
    """
    if name in built_in or _NAMED_OBJECT.fullmatch(name):
        return name
    raise ValueError(f"must be {', '.join(built_in)} or {own}, got '{name}'{remedy}")
