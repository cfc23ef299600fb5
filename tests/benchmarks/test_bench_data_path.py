"""The benchmark runs at a small size with this tree on both sides; times are not looked at."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING

import pytest

from tests.benchmarks import bench_data_path
from tests.benchmarks.main_call import run_main
from tests.launch import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def test_both_sides_are_measured_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One measurement serves for both sides, being of the same tree.
    monkeypatch.setattr(bench_data_path, "measure", functools.cache(bench_data_path.measure))
    out = tmp_path / "report"
    sizes = ["--tokens=20000", "--ranks=2", "--rounds=1", "--repeats=1"]
    run_main("bench_data_path", f"--before={REPOSITORY}", *sizes, f"--out={out}")
    rounds = json.loads(out.with_suffix(".json").read_text())["rounds"]
    assert set(rounds) == {"before", "after"}
    for (told,) in rounds.values():
        assert 19_000 < told["tokens"] <= 20_000
        assert told["broadcast_bytes"] < told["disk_bytes"]
        assert told["all_s"] > told["decode_s"] > 0
    assert "| broadcast to each rank |" in out.with_suffix(".md").read_text()
