from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.helpers import make_model_dir

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.sglang
def test_it_reports_tokens_per_second_of_every_contender(tmp_path: Path) -> None:
    model_dir = make_model_dir(tmp_path / "model")
    sizes = ["--rounds=1", "--rows=8", "--tokens=4", "--wide=64", f"--out={tmp_path / 'report'}"]
    subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.bench_engines", str(model_dir), *sizes],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        timeout=300,
    )
    sections = json.loads((tmp_path / "report.json").read_text())["sections"]
    assert [section["title"].split(", ")[1] for section in sections] == ["8 rows", "8 rows"]
    for section in sections:
        names = [timing["name"] for timing in section["timings"]]
        assert names == ["local", "sglang", "transformers' generate"]
        assert section["remarks"][0].count("tokens/s") == 3
