"""Each benchmark runs at a small size and writes a report; times are not looked at."""

import asyncio
import contextlib
import json
import re
from pathlib import Path

import pytest
import torch

from tests.benchmarks import bench_engines, bench_startup, harness
from tests.benchmarks.bench_buffer import measure as measure_buffer
from tests.benchmarks.bench_connections import measure, servers, time_waves
from tests.benchmarks.bench_engines import WIDE
from tests.benchmarks.helpers import run_main
from tests.benchmarks.samples import make_wide_model
from tests.benchmarks.stream_server import Load
from tests.distributed_launch import start_fork
from tests.fakes.fake_sglang import FakeSglang
from tests.trainer.dumps import make_random_model


@pytest.mark.slow
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
            "bench_kl",
            ["--tokens=96", "--columns=300", "--hidden=16", "--hidden-rounds=1"],
            {"ours", "eager torch", "torch.compile", "ours, chunks of 24"},
            [r"Ours moves 5·T·V·b = 0\.00 GB", r"Operators dispatched.*; eager torch: \d+\."],
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
    arguments = ["--rounds=1", f"--threads={torch.get_num_threads()}", *sizes]
    if name == "bench_loss_stage":  # it leaves nothing behind, and has forks of its own
        run_main(name, out, *arguments)
    else:  # some leave Megatron-core's process groups behind and change torch
        process = start_fork(run_main, name, out, *arguments)
        process.join(300)
        assert process.exitcode == 0
    report, text = json.loads(out.with_suffix(".json").read_text()), out.with_suffix(".md")
    assert report["machine"]["command"].startswith(f"python -m tests.benchmarks.{name}")
    for section in report["sections"]:
        timings = {timing["name"]: timing for timing in section["timings"]}
        assert section["baseline"] in timings
        assert all(timing["median_s"] > 0 for timing in timings.values())
        contenders -= timings.keys()
    assert not contenders
    for remark in (*remarks, *(f"## {re.escape(s['title'])}" for s in report["sections"])):
        assert re.search(remark, text.read_text()), remark


@pytest.mark.slow
def test_engines_report_tokens_per_second_of_every_contender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wide_model(tmp_path / "wide", hidden=64, **WIDE)
    sizes = ["--rounds=1", "--rows=8", "--tokens=4", "--wide=0"]
    threads = f"--threads={torch.get_num_threads()}"
    with FakeSglang() as fake:
        monkeypatch.setattr(bench_engines, "SglangServer", lambda *_: fake)
        monkeypatch.setattr(bench_engines, "running", contextlib.nullcontext)
        report, _ = run_main(
            "bench_engines", tmp_path / "report", str(tmp_path / "wide"), *sizes, threads
        )
    (section,) = report["sections"]
    assert section["title"] == "wide, 8 rows"
    names = [timing["name"] for timing in section["timings"]]
    assert names == ["local", "sglang", "transformers' generate"]
    assert section["remarks"][0].count("tokens/s") == 3
    assert "sglang: 64 tokens, " in section["remarks"][0]


@pytest.mark.slow
def test_train_asks_a_server_and_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_random_model(tmp_path / "model")
    rows = [json.dumps({"prompt": f"{n}+1=?", "answer": str(n + 1)}) + "\n" for n in range(32)]
    (tmp_path / "train.jsonl").write_text("".join(rows))
    monkeypatch.setattr(bench_startup, "LIBRARIES", {"import torch": "import json"})
    monkeypatch.setattr(bench_startup, "COMMANDS", {})
    monkeypatch.setattr(harness, "peak_bytes", lambda *_: 0)  # would start them again
    report, _ = run_main("bench_startup", tmp_path / "report", str(tmp_path), "--rounds=1")
    (section,) = report["sections"]
    seconds = {timing["name"]: timing["median_s"] for timing in section["timings"]}
    assert list(seconds) == ["import torch", "train, first request"]
    assert 0 < seconds["import torch"] < seconds["train, first request"]


def test_the_saved_buffer_is_read_again_and_measured(tmp_path: Path) -> None:
    row = asyncio.run(measure_buffer(300_000, tmp_path / "rollout.parquet"))
    # 8 bytes uncompressed; ids of 17.2 bits and log-probs whose last three bytes are noise.
    assert 5.0 < row["bytes_per_token"] < 6.5


def test_waves_of_requests_are_timed_one_by_one() -> None:
    seconds = asyncio.run(time_waves(num_requests=5, num_waves=2))
    assert len(seconds) == 2
    assert min(seconds) > 0


@pytest.mark.slow
def test_one_client_is_measured_against_engines_of_several_processes() -> None:
    load = Load(requests=8, prompt_tokens=8, response_tokens=32, tokens_per_s=400.0)
    with servers(load, processes=2, engines=4) as addresses:
        assert len(set(addresses)) == 4
        row = asyncio.run(measure(addresses, load, piece_tokens=8, seconds=1.0))
    assert row["errors"] == 0
    assert row["received_per_s"] > 0
    assert row["core_share"] > 0
