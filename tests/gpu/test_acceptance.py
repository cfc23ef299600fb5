"""The acceptance on a GPU, as far as it runs without one."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from tests.distributed_launch import run_ranks
from tests.gpu import acceptance, cpu_rank
from tests.gpu.acceptance import Check

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.mark.parametrize(
    ("name", "figure", "passes"),
    [
        ("forward bandwidth share", 0.9, True),
        ("forward bandwidth share", 0.8999, False),
        ("long rows backward bandwidth share", 0.85, True),
        ("forward against others (Liger)", 0.99, False),
        ("bound search us", 50.0, True),
        ("bound search us", 51.0, False),
        ("gradient norm (1.5B, plain)", 1.3, True),
        ("gradient norm (1.5B, plain)", math.inf, False),
        ("gradient norm (1.5B, plain)", math.nan, False),
        ("doctor: driver", 1.0, True),
        ("doctor: driver", 0.0, False),
    ],
)
def test_figures_are_compared_with_the_targets(name: str, figure: float, passes: bool) -> None:
    assert Check(name, figure).passes is passes


def test_a_check_is_a_line_of_json_and_a_row_of_the_table() -> None:
    checks = [Check("bound search us", 61.5), Check("pytest -m gpu", 1.0)]
    assert json.loads(checks[0].line()) == {
        "check": "bound search us",
        "figure": 61.5,
        "target": "<= 50",
        "pass": False,
    }
    assert acceptance.table(checks).splitlines() == [
        "check            figure  target",
        "bound search us  61.5    <= 50   FAIL",
        "pytest -m gpu    1       >= 1    pass",
    ]


@pytest.mark.parametrize("part", [*acceptance.PARTS, "all"])
def test_without_a_gpu_nothing_is_checked(
    part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert acceptance.main([part]) == 3
    assert capsys.readouterr() == ("", "no CUDA device: nothing was checked\n")


def test_a_part_that_fails_is_a_failed_check_and_the_next_one_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(options: argparse.Namespace) -> Iterator[Check]:
        yield Check("first", 1.0)
        raise ValueError("no such device")

    parts: dict[str, Any] = {"broken": broken, "sound": lambda _: iter([Check("last", 1.0)])}
    checks = acceptance.run(["broken", "sound"], argparse.Namespace(), parts.__getitem__)
    assert [(check.name, check.passes) for check in checks] == [
        ("first", True),
        ("broken ended without an error", False),
        ("last", True),
    ]
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3
    assert err == "broken: ValueError: no such device\n"


@pytest.mark.slow
@pytest.mark.distributed
def test_what_needs_no_gpu_runs_on_the_cpu_at_a_small_size(tmp_path: Path) -> None:
    parts = ["model", "train", "kernels", "ipc", "nccl"]
    (results,) = run_ranks(cpu_rank.run_parts, 1, tmp_path, parts, timeout_s=540)
    lines = {part: list(map(json.loads, out.splitlines())) for part, (_, out, _) in results.items()}
    names = {part: [line["check"] for line in found] for part, found in lines.items()}
    assert (tmp_path / "tiny" / "batch.npz").is_file()
    assert names["train"] == [
        "gradient norm (tiny, plain)",
        "tokens per second (tiny, plain)",
        "gradient norm (tiny, chunked logits)",
        "tokens per second (tiny, chunked logits)",
        "gradient norm (tiny, recomputed behaviour)",
        "tokens per second (tiny, recomputed behaviour)",
        "gradient norm (tiny, full recompute)",
        "tokens per second (tiny, full recompute)",
        "gradient norm difference (tiny, chunked logits)",
        "gradient norm difference (tiny, full recompute)",
    ]
    assert lines["train"][-2]["figure"] < 1e-5
    for part in ("model", "train", "ipc", "nccl"):
        status, _, table = results[part]
        assert (status, all(line["pass"] for line in lines[part])) == (0, True), table
    # Times on the CPU mean nothing, but every figure is there.
    assert names["kernels"] == [
        "forward bandwidth share",
        "backward bandwidth share",
        "forward against Megatron-core",
        "both against Megatron-core",
        "long rows forward bandwidth share",
        "long rows backward bandwidth share",
        "bound search us",
    ]
    assert all(line["figure"] > 0 for line in lines["kernels"])
