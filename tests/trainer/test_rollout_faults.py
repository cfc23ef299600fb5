"""A real server that hangs for a while, and is killed later, while samples are on their way."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.launch import start
from tests.trainer.chaos import steps, wait_for
from tests.trainer.runs import write_run

pytestmark = [pytest.mark.sglang, pytest.mark.distributed, pytest.mark.slow, pytest.mark.exhaustive]


def test_a_run_outlives_a_server_that_hangs_and_its_death_and_leaves_nothing_behind(
    tmp_path: Path, model_dir: Path, started: list[subprocess.Popen[str]]
) -> None:
    # A step changes log-probs by far more than their error; with one update all tokens count.
    config = write_run(
        tmp_path,
        model_dir,
        rollout={
            "max_response_tokens": 64,
            "temperature": 1.0,
            "oversample_groups": 2,
            "async_steps": 1,
            "stream_tokens": 8,
            "server": {"max_total_tokens": 8192, "mem_fraction": 0.2, "start_timeout_s": 180},
            "health": {
                "interval_s": 0.5,
                "timeout_s": 10,
                "stuck_timeout_s": 40,
                "patience_s": 240,
            },
        },
        train={"steps": 1000},
        checkpoint={"every_steps": 1},
        eval={"sets": []},
    )
    run_dir = tmp_path / "run"
    log = run_dir / "logs" / "collector.log"

    def num_returns() -> int:
        return log.read_text().count("needs weights")

    process = start(["train", str(config)])
    started.append(process)
    wait_for(process, lambda: len(steps(run_dir)) >= 1, "the first step")
    (server,) = _servers(process.pid)
    os.killpg(server, signal.SIGSTOP)
    wait_for(process, lambda: "is lost" in log.read_text(), "the time-out")
    returns = num_returns()
    os.killpg(server, signal.SIGCONT)
    wait_for(process, lambda: num_returns() > returns, "its return")
    num_steps = len(steps(run_dir))
    wait_for(process, lambda: len(steps(run_dir)) >= num_steps + 1, "a step after that")
    returns = num_returns()
    os.killpg(server, signal.SIGKILL)
    wait_for(process, lambda: num_returns() > returns, "a new server")
    num_steps = len(steps(run_dir))
    wait_for(process, lambda: len(steps(run_dir)) >= num_steps + 3, "steps with the new one")
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert psutil.wait_procs(children, timeout=30)[1] == []
    # A checkpoint may have been under way: the next save removes what there is of it.
    unfinished = run_dir.rglob("*.tmp")
    assert not [path for path in unfinished if "checkpoints" not in path.parts]
    rows = steps(run_dir)
    assert "died (SIGKILL); restarting (" in err
    # Every step was made once, and what the server lost was sampled again.
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert sum(row["rollout/lost_requests"] for row in rows) > 0
    # Servers that return have the trainer's weights, not those that they started with. Only tokens
    # of the newest weights can be compared.
    fresh = [row for row in rows[num_steps:] if row["mismatch/tokens"] > 0]
    assert fresh
    for row in fresh:
        assert 0 < row["mismatch/logprob_abs_max"] <= 1e-4


def _servers(trainer: int) -> list[int]:
    """Process groups of the servers that a trainer has started."""
    groups = []
    for child in psutil.Process(trainer).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            is_server = "engine.sglang.launcher" in " ".join(child.cmdline())
            if is_server and os.getpgid(child.pid) == child.pid:
                groups.append(child.pid)
    return groups
