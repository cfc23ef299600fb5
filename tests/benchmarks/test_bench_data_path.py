"""The benchmark runs at a small size with this tree on both sides; times are not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import REPOSITORY

pytestmark = pytest.mark.slow


def test_both_sides_are_measured_and_reported(tmp_path: Path) -> None:
    out = tmp_path / "report"
    command = [sys.executable, "-m", "tests.benchmarks.bench_data_path", f"--before={REPOSITORY}"]
    sizes = ["--tokens=20000", "--ranks=2", "--rounds=1", "--repeats=1"]
    subprocess.run(
        [*command, *sizes, f"--out={out}"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        timeout=300,
    )
    rounds = json.loads(out.with_suffix(".json").read_text())["rounds"]
    for (told,) in rounds.values():
        assert 19_000 < told["tokens"] <= 20_000
        assert told["broadcast_bytes"] < told["disk_bytes"]
        assert told["all_s"] > told["decode_s"] > 0
    assert "| broadcast to each rank |" in out.with_suffix(".md").read_text()
