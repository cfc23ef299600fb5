"""Servers and trainers that end while samples are on their way: nothing is lost.

One run is followed through three processes: one is interrupted after faults of its servers, the
next one loses its server for good, the last one goes on to the end.
"""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import pytest

from bapo_megatron.engine.sglang.keys import ADMIN_API_KEY_VARIABLE, API_KEY_VARIABLE
from tests.launch import free_port, run, start
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


@dataclass(frozen=True)
class Interrupted:
    """A run whose servers failed, and which was interrupted then."""

    config: Path
    run_dir: Path
    return_code: int
    err: str
    left_behind: list[psutil.Process]
    """What it had started and still runs."""
    new_servers_from: int
    """How many steps had been made when the first of the new servers came."""


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> Interrupted:
    """One of two servers hangs for a while, then both are killed."""
    directory = tmp_path_factory.mktemp("faults")
    # A step changes log-probs by far more than their error; with one update all tokens count.
    config = write_config(
        directory,
        random_model,
        algorithm={"entropy_coefficient": 0.01},
        optimizer={"lr": 1e-3},
        reward={"workers": 1},
    )
    run_dir = directory / "run"
    log = run_dir / "logs" / "collector.log"

    def num_returns() -> int:
        return log.read_text().count("needs weights")

    process = start(["train", str(config), "train.steps=1000"])
    try:
        wait_for(process, lambda: len(steps(run_dir)) >= 2, "the first steps")
        hung, other = servers(process)
        signal_server(hung, signal.SIGSTOP)
        wait_for(process, lambda: "is taken out" in log.read_text(), "the time-out")
        returns = num_returns()
        signal_server(hung, signal.SIGCONT)
        wait_for(process, lambda: num_returns() > returns, "its return")
        num_steps = len(steps(run_dir))
        wait_for(process, lambda: len(steps(run_dir)) >= num_steps + 2, "steps with both servers")
        returns = num_returns()
        for server in (hung, other):
            signal_server(server, signal.SIGKILL)
        wait_for(process, lambda: num_returns() > returns, "a new server")
        num_steps = len(steps(run_dir))
        wait_for(process, lambda: len(steps(run_dir)) >= num_steps + 3, "steps with new servers")
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    alive = psutil.wait_procs(children, timeout=30)[1]
    return Interrupted(config, run_dir, process.returncode, err, alive, num_steps)


def test_a_run_outlives_a_server_that_hangs_for_a_while_and_the_death_of_all(
    interrupted: Interrupted,
) -> None:
    rows = steps(interrupted.run_dir)
    assert "died (SIGKILL); it is started again (" in interrupted.err
    # Every step was made once, and what the servers lost was sampled again.
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert sum(row["rollout/lost_requests"] for row in rows) > 0
    # Servers that return have the trainer's weights, not those that they started with.
    _assert_servers_had_the_trainers_weights(rows[interrupted.new_servers_from :])


def test_an_interrupted_run_leaves_neither_processes_nor_unfinished_files(
    interrupted: Interrupted,
) -> None:
    assert interrupted.return_code != 0
    assert not interrupted.left_behind
    # A checkpoint may have been under way: the next save removes what there is of it.
    unfinished = interrupted.run_dir.rglob("*.tmp")
    assert not [path for path in unfinished if "checkpoints" not in path.parts]


def test_a_resumed_run_without_servers_saves_and_ends_and_resumes_to_its_end(
    interrupted: Interrupted, started: list[subprocess.Popen[str]]
) -> None:
    run_dir = interrupted.run_dir
    # Not ahead: every step has tokens of the newest weights, once the saved groups are used up.
    alone = ["rollout.server.count=1", "rollout.async_steps=0"]
    resumed = ["train", str(interrupted.config), "--resume", *alone]
    num_steps = len(steps(run_dir))
    rare = ["checkpoint.every_steps=1000", "rollout.health.patience_s=3"]
    # Nobody starts a server again whose owner is killed.
    keys = {API_KEY_VARIABLE: "key-of-a-user-01", ADMIN_API_KEY_VARIABLE: "key-of-the-admin"}
    port = free_port()
    serve = ["serve", str(interrupted.config), "rollout.server.count=1"]
    serving = start([*serve, f"rollout.server.port={port}"], environment=keys)
    started.append(serving)
    served = [f"rollout.servers=[http://127.0.0.1:{port}]", "train.steps=1000", *rare]
    assert serving.stdout is not None
    assert f"http://127.0.0.1:{port}" in serving.stdout.readline()
    process = start([*resumed, *served], environment=keys)
    started.append(process)
    wait_for(process, lambda: len(steps(run_dir)) >= num_steps + 2, "steps after the resumption")
    serving.kill()
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1, err
    # For 3 s, while samples or new weights waited for a server.
    assert "rollout.health.patience_s" in err, err
    assert "continue with resume=true" in err
    saved = len(steps(run_dir))
    assert saved >= num_steps + 2
    assert assert_balanced(run_dir)["trained"] == saved * GROUPS_PER_STEP

    result = run([*resumed, f"train.steps={saved + 2}"], timeout_s=400)
    assert result.returncode == 0, result.stderr
    rows = steps(run_dir)
    assert [row["step"] for row in rows] == list(range(1, saved + 3))
    assert assert_balanced(run_dir)["trained"] == (saved + 2) * GROUPS_PER_STEP
    # Their new servers had started with the model's first weights.
    _assert_servers_had_the_trainers_weights(rows[num_steps:])


def _assert_servers_had_the_trainers_weights(rows: list[dict[str, float]]) -> None:
    """Only tokens of the newest weights can be compared."""
    fresh = [row for row in rows if row["mismatch/tokens"] > 0]
    assert fresh
    for row in fresh:
        assert 0 < row["mismatch/logprob_abs_max"] <= 1e-4
