"""docs/formats.md has a row for every column of a dump, in order, with its type."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from bapo_megatron.data.dump import SAMPLE_COLUMNS, TEXT_COLUMNS
from bapo_megatron.data.token_columns import row_columns
from bapo_megatron.data.token_dump import TOKEN_COLUMNS
from tests.launch import REPOSITORY

_ROW = re.compile(r"\| `(\w+)` \| ([\w<>]+) \|(.*)\|")


@pytest.mark.parametrize(
    ("heading", "columns"),
    [
        ("Rollout dumps", {name: kind for name, (kind, _) in SAMPLE_COLUMNS.items()}),
        ("Token columns", {name: kind for name, (kind, _) in row_columns().items()}),
        ("Texts", {name: kind for name, (kind, _) in TEXT_COLUMNS.items()}),
        ("Token dumps", TOKEN_COLUMNS),
    ],
)
def test_the_schema_table_has_every_column(heading: str, columns: Mapping[str, Any]) -> None:
    text = (REPOSITORY / "docs" / "formats.md").read_text()
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [match.groups() for line in section.splitlines() if (match := _ROW.fullmatch(line))]
    stated = [(name, kind) for name, kind, _ in rows]
    # Arrow names the items of a list, too: list<element: int32>.
    assert stated == [(name, re.sub(r"\w+: ", "", str(kind))) for name, kind in columns.items()]
    assert all(meaning.strip() or name == "group_id" for name, _, meaning in rows)
