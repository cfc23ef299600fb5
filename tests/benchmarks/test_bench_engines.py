from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from tests.benchmarks.bench_engines import make_wide_model
from tests.benchmarks.main_call import run_main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.sglang
def test_it_reports_tokens_per_second_of_every_contender(tmp_path: Path) -> None:
    model_dir, out = tmp_path / "wide", tmp_path / "report"
    make_wide_model(model_dir, 64)
    # Without a second model, which would need a server of its own.
    sizes = ["--rounds=1", "--rows=8", "--tokens=4", "--wide=0"]
    threads = f"--threads={torch.get_num_threads()}"
    run_main("bench_engines", str(model_dir), *sizes, threads, f"--out={out}")
    [section] = json.loads(out.with_suffix(".json").read_text())["sections"]
    assert section["title"] == "wide, 8 rows"
    names = [timing["name"] for timing in section["timings"]]
    assert names == ["local", "sglang", "transformers' generate"]
    assert section["remarks"][0].count("tokens/s") == 3
