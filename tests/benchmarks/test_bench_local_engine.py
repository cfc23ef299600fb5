from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.engine.helpers import make_model_dir

REPOSITORY = Path(__file__).resolve().parents[2]


def test_it_reports_tokens_per_second_of_every_contender(tmp_path: Path) -> None:
    model_dir = make_model_dir(tmp_path / "model")
    sizes = ["--rounds=1", "--rows=8", "--tokens=4", f"--out={tmp_path / 'report'}"]
    subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.bench_local_engine", str(model_dir), *sizes],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        timeout=300,
    )
    [section] = json.loads((tmp_path / "report.json").read_text())["sections"]
    assert section["title"] == "8 rows"
    assert [timing["name"] for timing in section["timings"]] == [
        "local",
        "local, refilled",
        "transformers' generate",
    ]
    assert section["remarks"][0].count("tokens/s") == 3
