"""Each benchmark runs at a small size and writes a report; times are not looked at."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "sizes", "contenders", "remarks"),
    [
        (
            "bench_logprob",
            ["--tokens=8", "--columns=64"],
            {"ours", "eager torch", "torch.compile, logsumexp", "Megatron-core fused + entropy"},
            ["Measured read bandwidth"],
        ),
        (
            "bench_search",
            ["--tokens=64", "--columns=64", "--stage-tokens=16"],
            {"ours", "released loop", "loss stage"},
            [r"takes [\d.]+% of the loss stage", r"one all-reduce of [\d,]+ bytes per update"],
        ),
        (
            "bench_loss_stage",
            ["--tokens=300", "--columns=64", "--hidden=8", "--hidden-rounds=1"],
            {"ours", "search alone", "eager torch", "all at once", "chunks of 256"},
            [
                r"The search takes [\d.]+% of the loss stage",
                r"a micro-batch, counted on 2 tensor-parallel ranks: 1 all_gather_into_tensor\.",
                r"The search adds, per update: 1 all_reduce\.",
                # Table, contributions, search: the bounds of a table that exists.
                r"Operators dispatched.*; search alone: 3;",
                r"of 4 chunks, counted on 2 .*: 4 all_gather_into_tensor, 1 all_reduce\.",
                r"Operators dispatched.*: all at once: \d+; chunks of 256: \d+\.",
            ],
        ),
    ],
)
def test_a_benchmark_reports_every_contender(
    tmp_path: Path, name: str, sizes: list[str], contenders: set[str], remarks: list[str]
) -> None:
    out = tmp_path / "report"
    subprocess.run(
        [sys.executable, "-m", f"tests.benchmarks.{name}", "--rounds=1", *sizes, f"--out={out}"],
        cwd=REPOSITORY,
        env={**os.environ, "TORCH_COMPILE_DISABLE": "1"},  # compiling takes a minute
        check=True,
        capture_output=True,
        timeout=300,
    )
    report = json.loads(out.with_suffix(".json").read_text())
    assert report["machine"]["command"].startswith(f"python -m tests.benchmarks.{name}")
    for section in report["sections"]:
        timings = {timing["name"]: timing for timing in section["timings"]}
        assert timings[section["baseline"]]["ratio"] == 1.0
        assert all(timing["median_s"] > 0 for timing in timings.values())
        contenders -= timings.keys()
    assert not contenders
    text = out.with_suffix(".md").read_text()
    assert all(f"## {section['title']}" in text for section in report["sections"])
    for remark in remarks:
        assert re.search(remark, text), remark
