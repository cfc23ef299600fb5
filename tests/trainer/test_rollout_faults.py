"""Servers and trainers that are killed while samples are on their way: nothing is lost."""

from __future__ import annotations

import random
import signal
import subprocess
from typing import TYPE_CHECKING

import psutil
import pytest

from bapo_megatron.data.dump import read_batch
from tests.launch import run, start
from tests.trainer.chaos import (
    GROUPS_PER_STEP,
    assert_balanced,
    servers,
    signal_server,
    steps,
    wait_for,
    write_config,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.sglang, pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture
def config(tmp_path: Path, random_model: Path) -> Path:
    return write_config(tmp_path, random_model)


def test_a_run_outlives_a_server_that_hangs_for_a_while_and_one_that_is_killed(
    config: Path, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    run_dir, num_steps = tmp_path / "run", 20
    process = start(["train", str(config), f"train.steps={num_steps}"])
    started.append(process)
    wait_for(process, lambda: len(steps(run_dir)) >= 2, "the first steps")
    hung, killed = random.Random(0).sample(servers(process), 2)
    log = run_dir / "logs" / "collector.log"
    signal_server(hung, signal.SIGSTOP)
    wait_for(process, lambda: "is taken out" in log.read_text(), "the time-out")
    signal_server(hung, signal.SIGCONT)
    wait_for(process, lambda: "needs weights" in log.read_text(), "its return")
    made = len(steps(run_dir))
    wait_for(process, lambda: len(steps(run_dir)) >= made + 2, "steps with both servers")
    signal_server(killed, signal.SIGKILL)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, out + err
    assert "died (SIGKILL)" in err
    rows = steps(run_dir)
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    assert sum(row["rollout/lost_requests"] for row in rows) > 0
    assert assert_balanced(run_dir)["trained"] == num_steps * GROUPS_PER_STEP


def test_a_run_without_servers_saves_and_ends_and_one_that_is_killed_resumes(
    config: Path, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    run_dir = tmp_path / "run"
    rare = ["checkpoint.every_steps=100", "rollout.health.patience_s=3"]
    process = start(["train", str(config), "train.steps=100", *rare])
    started.append(process)
    wait_for(process, lambda: len(steps(run_dir)) >= 2, "the first steps")
    for server in servers(process):
        signal_server(server, signal.SIGKILL)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1, err
    # For 3 s, while samples or new weights waited for a server.
    assert "rollout.health.patience_s" in err, err
    assert "continue with resume=true" in err
    made = len(steps(run_dir))
    assert made >= 2
    assert assert_balanced(run_dir)["trained"] == made * GROUPS_PER_STEP

    resumed = ["train", str(config), "--resume", "rollout.server.count=1"]
    process = start([*resumed, "train.steps=100"])
    started.append(process)
    wait_for(process, lambda: len(steps(run_dir)) >= made + 2, "steps after the resumption")
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()  # the trainer alone: what it started ends by itself
    process.communicate()
    assert not psutil.wait_procs(children, timeout=30)[1]
    # Whatever has its final name is whole.
    for dump in (run_dir / "rollouts").glob("step_*.parquet"):
        assert len(read_batch(dump).groups) == GROUPS_PER_STEP

    result = run([*resumed, f"train.steps={made + 6}"], timeout_s=400)
    assert result.returncode == 0, result.stderr
    rows = steps(run_dir)
    assert [row["step"] for row in rows] == list(range(1, made + 7))
    assert assert_balanced(run_dir)["trained"] == (made + 6) * GROUPS_PER_STEP
