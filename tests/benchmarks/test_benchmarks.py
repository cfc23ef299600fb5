"""Each benchmark runs at a small size and writes a report; times are not looked at."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
import torch

from tests.benchmarks import harness
from tests.benchmarks.main_call import run_main
from tests.distributed_launch import start_fork

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


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
            "bench_verify",
            ["--hidden=32", "--layers=1"],
            {"with checksums", "without checksums"},
            [],
        ),
        (
            "bench_loss_stage",
            ["--tokens=300", "--columns=64", "--hidden=8", "--hidden-rounds=1"],
            {"ours", "search alone", "eager torch", "all at once", "chunks of 256"},
            [
                r"The search takes [\d.]+% of the loss stage",
                r"a micro-batch, counted on 2 tensor-parallel ranks: 1 all_gather_into_tensor\.",
                r"The search adds, per update of data-parallel ranks: 1 all_reduce\.",
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
    arguments = ["--rounds=1", f"--threads={torch.get_num_threads()}", *sizes, f"--out={out}"]
    if name in (
        "bench_logprob",
        "bench_verify",
    ):  # leave Megatron-core's process groups behind, change torch
        process = start_fork(run_main, name, *arguments)
        process.join(300)
        assert process.exitcode == 0
    else:
        run_main(name, *arguments)
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


def test_a_report_has_the_clocks_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {"SM": 1980.0, "memory": 3201.0}
    monkeypatch.setattr(harness, "clocks_under_load", lambda _: clocks)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H200")
    where = harness.machine(torch.device("cuda"))
    assert where["device"] == "NVIDIA H200 (SM clock 1980 MHz, memory clock 3201 MHz)"
