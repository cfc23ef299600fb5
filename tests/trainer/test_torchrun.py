"""Two ranks under torchrun: one clear line for an error, and no process after any end."""

from __future__ import annotations

import re
import shutil
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.launch import start, torchrun
from tests.trainer.chaos import steps, wait_for
from tests.trainer.dumps import MANY_STEPS

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

pytestmark = pytest.mark.distributed


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


def test_a_dump_of_another_step_is_named_by_rank_0_alone(
    replay_config: Path, mixed_dumps: Path, tmp_path: Path
) -> None:
    dumps = tmp_path / "dumps"
    shutil.copytree(mixed_dumps, dumps)
    shutil.copy(dumps / "step_000002.parquet", dumps / "step_000003.parquet")
    result = torchrun(
        ["train", str(replay_config), f"run_dir={tmp_path / 'run'}", f"replay={dumps}"], ranks=2
    )
    assert result.returncode != 0
    _assert_no_rank_shows_a_traceback(result.stderr)
    complaints = _complaints(result.stderr)
    (line,) = complaints[0]
    assert "step_000003.parquet: holds step 2, not 3" in line
    # torchrun may end rank 1 before it has said anything.
    assert complaints[1] in ([], [f"rank 0: {line}"])


def test_no_process_outlives_torchrun_that_is_interrupted(
    replay_config: Path, many_dumps: Path, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    # test_checkpointing.py kills torchrun.
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
    started.append(process)
    wait_for(process, lambda: len(steps(run_dir)) >= 2, "two steps")
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    process.send_signal(signal.SIGINT)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    _, stderr = process.communicate(timeout=30)
    assert process.returncode != 0
    _assert_no_rank_shows_a_traceback(stderr)
