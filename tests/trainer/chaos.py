"""Kills what a training run started, and checks afterwards that no sample was lost or doubled."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

from bapo_megatron.data.dump import read_batch
from bapo_megatron.policy.checkpoint_files import ROLLOUT_NAME, find_latest
from bapo_megatron.rollout.saved import read_saved
from bapo_megatron.telemetry.sinks import read_metrics
from tests.trainer.runs import sampling_settings

GROUPS_PER_STEP = 4


def write_config(directory: Path, model: Path, **changes: Any) -> Path:
    """A run whose steps take a second or two, on two servers of its own, one step ahead."""
    server = {"count": 2, "max_total_tokens": 8192, "mem_fraction": 0.2, "start_timeout_s": 180}
    rollout = {
        "max_response_tokens": 160,
        "temperature": 1.0,
        "oversample_groups": 2,
        "async_steps": 1,
        "stream_tokens": 8,
        "server": server,
        "health": {"interval_s": 0.5, "timeout_s": 10, "stuck_timeout_s": 40, "patience_s": 240},
    }
    settings = sampling_settings(
        directory,
        model,
        rollout=rollout,
        algorithm={"updates_per_batch": 2},
        optimizer={"lr": 1e-4},
        train={"steps": 8},
        checkpoint={"every_steps": 1},
        log={"tensorboard": False},
    )
    del settings["eval"], settings["reward"]
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(settings | changes))
    return path


def steps(run_dir: Path) -> list[dict[str, float]]:
    """Rows of the steps that were made."""
    path = run_dir / "metrics.jsonl"
    rows = read_metrics(path) if path.exists() else []
    return [row for row in rows if row["step"] > 0]


def wait_for(
    process: subprocess.Popen[str], condition: Callable[[], bool], what: str, timeout_s: float = 300
) -> None:
    """Wait for something to happen in a run that goes on."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.1)


def servers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The leaders of the servers' process groups."""
    launchers = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "engine.sglang.launcher" in " ".join(child.cmdline()):
                launchers.append(child)
    return [child for child in launchers if os.getpgid(child.pid) == child.pid]


def signal_server(server: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to every process of a server at once."""
    os.killpg(server.pid, number)


def assert_balanced(run_dir: Path) -> dict[str, int]:
    """Every prompt drawn was trained once, dropped, or waits in the newest checkpoint.

    Returns:
        How many groups were drawn, trained, dropped and wait.
    """
    trained: list[int] = []
    for path in sorted((run_dir / "rollouts").glob("step_*.parquet")):
        batch = read_batch(path)
        trained += [group.group_id for group in batch.groups]
        for sample in batch.samples:
            versions = [span.version for span in sample.versions]
            assert versions == sorted(versions)
            assert max(versions, default=0) <= batch.version
            assert np.isfinite(sample.behaviour_logprobs).all()
    assert len(trained) == len(set(trained))
    newest = find_latest(run_dir / "checkpoints")
    assert newest is not None
    buffer = read_saved(newest / ROLLOUT_NAME).buffer
    waiting = [group.group_id for group in buffer]
    assert not set(trained) & set(waiting)
    assert buffer.num_trained == len(trained)
    num_dropped = buffer.dropped.total()
    assert buffer.next_group_id == len(trained) + num_dropped + len(waiting)
    return {
        "drawn": buffer.next_group_id,
        "trained": len(trained),
        "dropped": num_dropped,
        "waiting": len(waiting),
    }
