"""Two ranks under torchrun: one clear line for an error, and no process after any end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from bapo_megatron.data.dump import read_batch, write_batch
from tests.launch import run, start
from tests.trainer.dumps import MANY_STEPS, write_dumps

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def nan_dumps(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> Path:
    """Two steps; in the second, the first log-prob of the first sample of group 4 is NaN."""
    directory = write_dumps(tmp_path_factory.mktemp("nan"), random_model, steps=2)
    path = directory / "step_000002.parquet"
    batch = read_batch(path)
    (group, *groups), (sample, *samples) = batch.groups, batch.groups[0].samples
    logprobs = np.array(sample.behaviour_logprobs)
    logprobs[0] = np.nan
    samples = [replace(sample, behaviour_logprobs=logprobs), *samples]
    path.unlink()
    write_batch(path, replace(batch, groups=(replace(group, samples=tuple(samples)), *groups)))
    return directory


@pytest.fixture
def training(
    replay_config: Path, many_dumps: Path, tmp_path: Path
) -> Iterator[subprocess.Popen[str]]:
    """torchrun with two ranks, past its first steps; whatever a failed test leaves is killed."""
    run_dir = tmp_path / "run"
    process = start(
        [
            "train",
            str(replay_config),
            f"run_dir={run_dir}",
            f"replay={many_dumps}",
            f"train.steps={MANY_STEPS}",
        ],
        ranks=2,
    )
    try:
        metrics = run_dir / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while not metrics.is_file() or metrics.read_text().count("\n") < 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "no step within 60 s"
            time.sleep(0.1)
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _complaints(stderr: str) -> dict[int, list[str]]:
    """The lines of the command line's own errors, by rank."""
    lines: dict[int, list[str]] = {0: [], 1: []}
    for line in stderr.splitlines():
        if found := re.fullmatch(r"(?:\[rank (\d)\] )?bapo-megatron: (.*)", line):
            lines[int(found[1] or 0)].append(found[2])
    return lines


def _assert_no_rank_shows_a_traceback(stderr: str) -> None:
    """torchrun shows one of its own, which never comes through our files."""
    assert not re.search(r'bapo_megatron/\w+\.py", line \d+', stderr)


def test_a_nan_is_reported_in_one_line(
    replay_config: Path, nan_dumps: Path, tmp_path: Path
) -> None:
    result = run(
        [
            "train",
            str(replay_config),
            f"run_dir={tmp_path / 'run'}",
            f"replay={nan_dumps}",
            "train.steps=2",
        ],
        ranks=2,
    )
    assert result.returncode != 0
    _assert_no_rank_shows_a_traceback(result.stderr)
    complaints = _complaints(result.stderr)
    # Every rank knows the place; torchrun may end one before it has told.
    lines = {*complaints[0], *complaints[1]}
    assert len(lines) == 1
    assert lines.pop().startswith("step 2: sample 0 of group 4")


def test_a_dump_of_another_step_is_named_by_rank_0_alone(
    replay_config: Path, mixed_dumps: Path, tmp_path: Path
) -> None:
    dumps = tmp_path / "dumps"
    shutil.copytree(mixed_dumps, dumps)
    shutil.copy(dumps / "step_000002.parquet", dumps / "step_000003.parquet")
    result = run(
        ["train", str(replay_config), f"run_dir={tmp_path / 'run'}", f"replay={dumps}"], ranks=2
    )
    assert result.returncode != 0
    _assert_no_rank_shows_a_traceback(result.stderr)
    complaints = _complaints(result.stderr)
    (line,) = complaints[0]
    assert "step_000003.parquet: holds step 2, not 3" in line
    # torchrun may end rank 1 before it has said anything.
    assert complaints[1] in ([], [f"rank 0: {line}"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda n: n.name)
def test_no_process_outlives_torchrun(
    training: subprocess.Popen[str], number: signal.Signals
) -> None:
    children = psutil.Process(training.pid).children(recursive=True)
    assert len(children) >= 2
    training.send_signal(number)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    _, stderr = training.communicate(timeout=30)
    assert training.returncode != 0
    if number is signal.SIGINT:
        _assert_no_rank_shows_a_traceback(stderr)
