"""The names of metrics that docs/metrics.md lists."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.launch import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterable

LISTED = [
    name
    for line in (REPOSITORY / "docs" / "metrics.md").read_text().splitlines()
    if line.startswith("| `")
    for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])
]
_PATTERNS = [
    re.compile(re.sub(r"<.*?>", ".+", re.escape(name).replace(r"\<", "<"))) for name in LISTED
]


def unlisted(names: Iterable[str]) -> set[str]:
    """Those of the names that the page does not list."""
    return {name for name in names if not any(p.fullmatch(name) for p in _PATTERNS)}
