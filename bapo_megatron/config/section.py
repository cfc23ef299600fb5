"""The base of every section of the configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

UNION_TAGS = ("<set>", "<list>")
"""What validation puts between the keys of a value that is one section or a list of them."""


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )
