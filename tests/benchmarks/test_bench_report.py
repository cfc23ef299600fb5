"""The benchmark of the report's page, with runs of a few responses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.benchmarks import bench_report
from tests.benchmarks.bench_report import Shape
from tests.benchmarks.main_call import run_main

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.browser


def test_pages_are_written_opened_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_report, "SHAPES", (Shape(20, 2, 2, 10), Shape(1, 1, 2, 3000)))
    out = tmp_path / "report"
    run_main("bench_report", "--rounds=1", f"--out={out}")
    many, long = json.loads(out.with_suffix(".json").read_text())["pages"]
    # 16 of the steps, and everything of them; lengths are from 5 to 14.
    assert 16 * 4 * 5 <= many["shown_tokens"] < 16 * 4 * 15
    assert long["shown_tokens"] == 2 * 3000
    for page in (many, long):
        assert 4_000_000 < page["page_bytes"] < 20_000_000
        assert min(page["write_s"], page["open_s"], page["read_s"]) > 0
    lines = out.with_suffix(".md").read_text().splitlines()
    assert lines[-1].startswith("| 2 responses of 3,000 tokens | ")
