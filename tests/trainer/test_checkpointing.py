"""A run that was killed and resumed equals one that was not, in every way of saving."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest
from safetensors.torch import load_file

from bapo_megatron.telemetry.sinks import read_metrics
from bapo_megatron.telemetry.starts import read_starts
from tests.launch import run, start
from tests.trainer.dumps import MANY_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

COMPARED = (
    "loss/policy",
    "policy/grad_norm",
    "policy/entropy",
    "bapo/clip_high",
    "bapo/clip_low",
    "train/lr",
)
EVERY_STEP = ("train.steps=3", "checkpoint.every_steps=1", "checkpoint.keep_last=9")

TP2 = ("parallel.tensor=2",)
PP2 = ("parallel.pipeline=2",)
ASYNCHRONOUS = ("checkpoint.asynchronous=true",)


def _train(config: Path, run_dir: Path, *overrides: str, ranks: int) -> list[dict[str, float]]:
    result = run(["train", str(config), f"run_dir={run_dir}", *overrides], ranks=ranks)
    assert result.returncode == 0, result.stderr
    return read_metrics(run_dir / "metrics.jsonl")


def _weights(run_dir: Path) -> dict[str, object]:
    return load_file(run_dir / "hf" / "model.safetensors")


def _assert_equal_metrics(
    rows: list[dict[str, float]], expected: list[dict[str, float]], tolerance: float
) -> None:
    for row, reference in zip(rows, expected, strict=True):
        for name in COMPARED:
            assert row[name] == pytest.approx(reference[name], rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize(
    ("saved_by", "resumed_by", "tolerance"),
    [
        pytest.param(ASYNCHRONOUS, ASYNCHRONOUS, 1e-6, id="DP 2, asynchronous"),
        # tests/policy has the other layouts.
        pytest.param((*PP2, *ASYNCHRONOUS), TP2, 1e-5, id="PP 2, asynchronous, to TP 2"),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one(
    replay_config: Path,
    tmp_path: Path,
    saved_by: tuple[str, ...],
    resumed_by: tuple[str, ...],
    tolerance: float,
) -> None:
    run_dir = tmp_path / "run"
    expected = _train(replay_config, run_dir, *EVERY_STEP, *saved_by, ranks=2)
    expected_weights = _weights(run_dir)
    # Forget everything after the first step, as if the run had been killed there.
    (run_dir / "checkpoints" / "latest").write_text("step_1\n")
    rows = _train(replay_config, run_dir, *EVERY_STEP, *resumed_by, "resume=true", ranks=2)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [(start.step, start.world_size) for start in read_starts(run_dir)] == [(0, 2), (1, 2)]
    _assert_equal_metrics(rows, expected, tolerance)
    resumed_weights = _weights(run_dir)
    assert resumed_weights.keys() == expected_weights.keys()
    for name, tensor in expected_weights.items():
        assert (resumed_weights[name] - tensor).abs().max() < tolerance, name
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert names == {"abandoned_1", "latest", *(f"step_{step}" for step in range(1, 4))}


def _end_in_the_middle(
    arguments: list[str], run_dir: Path, ranks: int, number: signal.Signals
) -> str:
    """End a training that saves at every step once it has saved three times; returns its stderr.

    None of its processes may be left then.
    """
    process = start(arguments, ranks=ranks)
    latest = run_dir / "checkpoints" / "latest"
    try:
        deadline = time.monotonic() + 120
        while not latest.is_file() or int(latest.read_text().removeprefix("step_")) < 3:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "three steps took too long"
            time.sleep(0.02)
        children = psutil.Process(process.pid).children(recursive=True)
        assert ranks == 1 or len(children) >= ranks
        process.send_signal(number)
        assert psutil.wait_procs(children, timeout=30)[1] == []
        return process.communicate(timeout=30)[1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def saves_often(replay_config: Path, many_dumps: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Arguments of a training that saves in the background at every step."""

    def arguments(*overrides: str) -> list[str]:
        return [
            "train",
            str(replay_config),
            f"run_dir={tmp_path / 'run'}",
            f"replay={many_dumps}",
            f"train.steps={MANY_STEPS}",
            "checkpoint.every_steps=1",
            "optimizer.schedule=constant",  # the same, however many steps there are
            *ASYNCHRONOUS,
            *overrides,
        ]

    return arguments


@pytest.mark.parametrize(
    ("number", "ranks"), [(signal.SIGKILL, 2), (signal.SIGINT, 1)], ids=["killed", "interrupted"]
)
def test_a_run_that_ends_while_it_saves_in_the_background_goes_on_from_its_last_checkpoint(
    saves_often: Callable[..., list[str]], tmp_path: Path, number: signal.Signals, ranks: int
) -> None:
    run_dir = tmp_path / "run"
    stderr = _end_in_the_middle(saves_often(), run_dir, ranks, number)
    done = int((run_dir / "checkpoints" / "latest").read_text().removeprefix("step_"))
    if number == signal.SIGINT:
        assert "Traceback" not in stderr
        assert stderr.strip().splitlines()[-1] == (
            "bapo-megatron: stopped by SIGINT; the same command with --resume continues from "
            f"{run_dir / 'checkpoints' / f'step_{done}'}"
        )
    steps = f"train.steps={done + 2}"
    result = run([*saves_often("resume=true"), steps], ranks=ranks)
    assert result.returncode == 0, result.stderr
    assert f"step_{done}: {done} steps done\n" in result.stderr
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert len(rows) == done + 2
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == done + 2
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert names == {"latest", f"step_{done + 1}", f"step_{done + 2}"}
    assert (run_dir / "saved").read_text() == f"step_{done + 2}\n"
    if number == signal.SIGKILL:
        never = ("checkpoint.every_steps=0", "checkpoint.at_end=false")
        whole = [*saves_often(steps, *never), f"run_dir={tmp_path / 'whole'}"]
        assert run(whole, ranks=ranks).returncode == 0
        expected = read_metrics(tmp_path / "whole" / "metrics.jsonl")
        _assert_equal_metrics(rows, expected, 1e-6)
