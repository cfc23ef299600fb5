"""Runs whose turns are cells of ``python_tool``, killed while a sandbox runs one of them."""

import contextlib
import os
import random
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.launch import start
from tests.sandbox.host import require_bubblewrap
from tests.trainer.runs import assert_same_training, run_of_short_turns, train

require_bubblewrap()
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.exhaustive]

CELLS = "tests.environment.cells"
KILLS = int(os.environ.get("BAPO_TEST_KILLS", "2"))
"""Ten were tried by hand."""


def _sandboxes(process: subprocess.Popen[str]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
        return [child for child in children if child.name() == "bwrap"]
    return []


def _kill_within_a_tool(process: subprocess.Popen[str], delay_s: float) -> None:
    """Kill -9 once a sandbox has run for a while, unless the run ends before."""
    first_s = None
    while process.poll() is None and (first_s is None or time.monotonic() < first_s + delay_s):
        if first_s is None and _sandboxes(process):
            first_s = time.monotonic()
        time.sleep(0.02)
    while process.poll() is None and not (sandboxes := _sandboxes(process)):
        time.sleep(0.002)
    process.kill()
    process.communicate()
    assert psutil.wait_procs(sandboxes, timeout=30)[1] == []


def test_runs_that_are_killed_within_a_tool_equal_another_one(
    model_dir: Path, tmp_path: Path
) -> None:
    rollout = {
        "environment": f"{CELLS}:Cells",
        "episodes": {"workers": 2, "max_turns": 3, "step_timeout_s": 60},
        "max_response_tokens": 48,
    }
    reward = {"name": "seen", "function": f"{CELLS}:seen"}
    config = run_of_short_turns(tmp_path, model_dir, rollout, reward)
    rows = train(config, tmp_path / "whole")
    assert any(row.get("rollout/environment_calls_per_response", 0) > 0 for row in rows)
    draws = random.Random(0)
    for kill in range(KILLS):
        resume = ["--resume"] if kill else []
        process = start(["train", str(config), f"run_dir={tmp_path / 'killed'}", *resume])
        _kill_within_a_tool(process, draws.uniform(0, 4))
    train(config, tmp_path / "killed", "--resume")
    assert_same_training(tmp_path / "killed", tmp_path / "whole")
