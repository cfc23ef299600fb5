"""The acceptance on a GPU, as far as it runs without one."""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu import acceptance, bare_machine, parts
from tests.gpu.acceptance import Check
from tests.gpu.ranks import require_nccl
from tests.gpu.step_profile import kind_of

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("name", "figure", "passes"),
    [
        ("forward bandwidth share", 0.9, True),
        ("forward bandwidth share", 0.8999, False),
        ("forward against others (Liger)", 0.99, False),
        ("bound search us", 50.0, True),
        ("bound search us", 51.0, False),
        ("loss stage share on a CPU (tiny, plain)", 0.3, True),
        ("gradient norm (1.5B, plain)", 1.3, True),
        ("gradient norm (1.5B, plain)", math.inf, False),
        ("gradient norm (1.5B, plain)", math.nan, False),
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


def test_without_torch_nothing_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert acceptance.main(["all"]) == 3
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("no torch (")
    assert err.endswith("): nothing was checked; install it as docs/gpu.md says\n")


def test_a_part_that_raises_is_a_failed_check(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(options: argparse.Namespace) -> Iterator[Check]:
        yield Check("first", 1.0)
        raise ValueError("no such device")

    checks = acceptance.run("broken", argparse.Namespace(), broken)
    assert [(check.name, check.passes) for check in checks] == [
        ("first", True),
        ("broken ended without an error", False),
        ("seconds (broken)", True),
    ]
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3
    assert err == "broken: ValueError: no such device\n"


def test_a_part_that_lacks_something_is_skipped_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def lacking(options: argparse.Namespace) -> Iterator[Check]:
        raise acceptance.SkipPartError("no SGLang")
        yield

    (check,) = acceptance.run("sglang", argparse.Namespace(), lacking)
    assert (check.passes, check.skipped) == (True, "no SGLang")
    assert json.loads(capsys.readouterr().out) == {"skipped": "sglang", "why": "no SGLang"}
    assert acceptance.table([check]).splitlines()[1] == "sglang                  skipped: no SGLang"


@pytest.mark.parametrize(
    ("version", "is_skipped"), [("2.28.9", True), ("2.30.7", False), ("not loaded", True)]
)
def test_two_ranks_on_one_gpu_need_nccl_2_30(
    version: str, is_skipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.gpu.ranks.nccl_version", lambda: version)
    with (
        pytest.raises(acceptance.SkipPartError, match=version)
        if is_skipped
        else contextlib.nullcontext()
    ):
        require_nccl()


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void flash::flash_fwd_kernel<cutlass>", "attention"),
        ("nvjet_tst_128x256_64x4", "GEMM"),
        ("bapo::logprob_forward_kernel", "loss stage"),
        ("ncclDevKernel_AllReduce_Sum_f32", "communication"),
        ("void multi_tensor_apply_kernel<AdamFunctor>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("vectorized_elementwise_kernel<SiluFunctor>", "elementwise, norms and others"),
        ("aten::addmm", "GEMM"),
    ],
)
def test_a_kernel_has_a_kind(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_needs_lists_the_wheels(capsys: pytest.CaptureFixture[str]) -> None:
    assert acceptance.main(["needs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[: len(acceptance.PARTS)]] == list(
        acceptance.PARTS
    )
    assert "megatron-core==0.19.2  # 2.37" in lines
    assert lines[-1] == "pip install --no-deps -r requirements/gpu_acceptance.txt"


def test_the_listed_wheels_are_those_that_are_tested_here() -> None:
    pins = bare_machine.listed()
    del pins["torch-memory-saver"], pins["typing-extensions"]  # of SGLang on a GPU, and of torch
    cpu = (acceptance.WHEELS.parent / "cpu.txt").read_text().lower().replace("_", "-").splitlines()
    assert {f"{name}=={version}" for name, version in pins.items()} <= set(cpu)


def test_the_files_with_tests_for_a_gpu_are_found() -> None:
    found = {path.name for path in parts.gpu_tests()}
    assert {"test_cuda_device.py", "test_kernel_logits.py"} <= found


def test_what_doctor_judges_is_a_check_unless_no_part_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdicts = {"driver": "problem", "megatron-core": "ok", "apex": "note", "transformers": "ok"}
    rows = [{"topic": topic, "verdict": verdict} for topic, verdict in verdicts.items()]
    answers = {("bapo_megatron", "doctor", "--json"): json.dumps(rows)}
    monkeypatch.setattr(parts, "_python", lambda *words: SimpleNamespace(stdout=answers[words]))
    checks = list(parts.build(argparse.Namespace()))
    assert checks == [Check("doctor: driver", 0.0), Check("doctor: megatron-core", 1.0)]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_part_that_dies_does_not_end_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = acceptance.parse(["all", f"--dir={tmp_path}", *bare_machine.TINY])
    checks = acceptance.run_apart(["no such part", "ipc"], options)
    assert [(check.name, check.passes) for check in checks] == [
        ("no such part ended without an error", False),
        ("a child process sees a shared bucket", True),
        ("seconds (ipc)", True),
    ]
    assert capsys.readouterr().out.splitlines() == [check.line() for check in checks]


def test_a_part_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(acceptance, "HANG_S", 0.1)  # before it can have imported torch
    options = acceptance.parse(["all", f"--dir={tmp_path}", *bare_machine.TINY])
    (check,) = acceptance.run_apart(["sync"], options)
    assert (check.name, check.passes) == ("sync ended without an error", False)
    assert capsys.readouterr().err == "sync: given up after 0.1 s\n"


@pytest.mark.slow
@pytest.mark.distributed
def test_the_listed_wheels_suffice_for_what_runs_on_the_cpu(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "tests.gpu.bare_machine", tmp_path],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert answer.returncode == 0, answer.stderr
    results = json.loads(answer.stdout.splitlines()[-1])
    lines = {part: list(map(json.loads, out.splitlines())) for part, (_, out, _) in results.items()}
    names = {
        part: [line["check"] for line in of_part if "check" in line]
        for part, of_part in lines.items()
    }
    assert (tmp_path / "tiny" / "batch.npz").is_file()
    assert names["train"] == [
        "gradient norm (tiny, plain)",
        "tokens per second (tiny, plain)",
        "loss stage share on a CPU (tiny, plain)",
        "gradient norm (tiny, chunked logits)",
        "tokens per second (tiny, chunked logits)",
        "gradient norm (tiny, recomputed behaviour)",
        "tokens per second (tiny, recomputed behaviour)",
        "gradient norm (tiny, full recompute)",
        "tokens per second (tiny, full recompute)",
        "gradient norm (tiny, adapters)",
        "tokens per second (tiny, adapters)",
        "gradient norm (tiny, reference)",
        "tokens per second (tiny, reference)",
        "gradient norm (tiny, teacher)",
        "tokens per second (tiny, teacher)",
        "gradient norm difference (tiny, chunked logits)",
        "gradient norm difference (tiny, full recompute)",
        "gradient norm difference (tiny, reference)",
        "gradient norm difference (tiny, teacher)",
        "seconds (train)",
    ]
    assert lines["train"][2]["figure"] > 0
    assert all(line["figure"] < 1e-5 for line in lines["train"][-5:-1])
    differences = {
        part: [name for name in names[part] if "difference" in name] for part in bare_machine.PARTS
    }
    assert differences["experts"] == [
        "gradient norm difference (tiny experts, replayed routes)",
        "gradient norm difference (tiny experts, one by one)",
    ]
    assert differences["hybrid"] == ["gradient norm difference (tiny hybrid, full recompute)"]
    assert differences["ranks"] == [
        f"norm difference of two ranks ({layout})"
        for layout in (
            "tiny, tensor",
            "tiny, pipeline",
            "tiny, context",
            "tiny, data",
            "tiny experts, expert",
        )
    ]
    assert sum(line["figure"] for line in lines["profile"][:-1]) == pytest.approx(1)
    assert (tmp_path / "profile tiny.json").is_file()
    assert lines["fp8"] == [
        {"skipped": "fp8", "why": "Transformer Engine is not installed (docs/launch.md)"}
    ]
    assert names["sync"][-2:] == ["the bytes of every broadcast", "seconds (sync)"]
    for part in set(bare_machine.PARTS) - {"kernels", "fp8"}:
        status, _, table = results[part]
        assert (status, all(line["pass"] for line in lines[part])) == (0, True), table
    # Times on the CPU mean nothing, but every figure is there.
    assert names["kernels"] == [
        "copy TB/s",
        "forward bandwidth share",
        "backward bandwidth share",
        "forward against Megatron-core",
        "both against Megatron-core",
        "long rows copy TB/s",
        "long rows forward bandwidth share",
        "long rows backward bandwidth share",
        "bound search us",
        "seconds (kernels)",
    ]
    assert all(line["figure"] > 0 for line in lines["kernels"])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.sglang
def test_the_part_with_sglang_trains_by_serve_and_a_broadcast_on_the_cpu(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["sglang", "--device=cpu", f"--dir={tmp_path}", "--steps=2"]
    acceptance.main([*arguments, "--overrides", "eval.max_prompts=16"])
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    figures = {line["check"]: line["figure"] for line in lines}
    assert figures["mismatch of sampler and trainer (broadcast)"] < 1e-4
    assert figures["difference after a weight sync (broadcast)"] < 1e-4
    assert math.isfinite(figures["accuracy gained (broadcast)"])
    assert "sglang ended without an error" not in figures
