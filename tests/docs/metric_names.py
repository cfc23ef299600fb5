"""The names of metrics that docs/metrics.md lists."""

import re
from collections.abc import Iterable

from tests.launch import REPOSITORY

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
