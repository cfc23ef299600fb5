"""Runs of every kind of episode whose processes are killed at random moments equal another one."""

import contextlib
import os
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from bapo_megatron.data.dump import read_batch
from tests.launch import start
from tests.reward.own_functions import EVEN_LENGTH
from tests.sandbox.host import require_bubblewrap
from tests.trainer.runs import assert_same_training, run_of_short_turns, train

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.exhaustive]

KILLS = int(os.environ.get("BAPO_TEST_KILLS", "3"))
"""Per kind, one victim after the other."""
SEED = int(os.environ.get("BAPO_TEST_KILLS_SEED", "0"))
AGENTS, CELLS = "tests.agent.agents", "tests.environment.cells"
TURNS = {"max_turns": 3, "workers": 2, "step_timeout_s": 60}
KINDS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "plain": ({"max_response_tokens": 48}, EVEN_LENGTH),
    "environment": (
        {
            "environment": "tests.environment.own_environments:Tokens",
            "episodes": TURNS,
            "max_response_tokens": 48,
        },
        EVEN_LENGTH,
    ),
    "tool": (
        {"environment": f"{CELLS}:Cells", "episodes": TURNS, "max_response_tokens": 48},
        {"name": "seen", "function": f"{CELLS}:seen"},
    ),
    "agent": (
        {"agent": f"{AGENTS}:wanders", "agent_sandbox": None, "max_response_tokens": 64},
        {"name": "even", "function": f"{AGENTS}:even"},
    ),
}
"""``rollout`` and the reward function."""
VICTIMS = ("trainer", "collector", "worker")


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_whose_processes_are_killed_equals_another_one(
    kind: str, model_dir: Path, tmp_path: Path
) -> None:
    if kind == "tool":
        require_bubblewrap()
    config = run_of_short_turns(tmp_path, model_dir, *KINDS[kind])
    start_s = time.monotonic()
    rows = train(config, tmp_path / "whole")
    whole_s = time.monotonic() - start_s
    batch = read_batch(tmp_path / "whole" / "rollouts" / "step_000002.parquet")
    assert (rows[-1].get("rollout/turns_mean", 1) > 1) == (kind != "plain")
    assert any(sample.branches for sample in batch.samples) == (kind == "agent")
    assert rows[-1].get("rollout/agent_forks_share", 0) == 0
    uses_tools = any(row.get("rollout/environment_calls_per_response", 0) > 0 for row in rows)
    assert uses_tools == (kind == "tool")
    draws, resume, run_dir = random.Random(f"{kind}{SEED}"), list[str](), tmp_path / "killed"
    for kill in range(KILLS):
        process = start(["train", str(config), f"run_dir={run_dir}", *resume])
        victim = VICTIMS[kill % len(VICTIMS)]
        delay_s = draws.uniform(0.2, 0.9) * whole_s
        children = _strike(
            process, victim, draws, delay_s, within="bwrap" if kind == "tool" else ""
        )
        _, err = process.communicate(timeout=300)
        assert psutil.wait_procs(children, timeout=30)[1] == []
        is_loading = "ended before it was ready" in err  # then its owner ends the run
        assert process.returncode == 0 or victim != "worker" or is_loading, err
        resume = ["--resume"]
        if process.returncode == 0:
            assert_same_training(run_dir, tmp_path / "whole")
            resume, run_dir = [], tmp_path / f"killed{kill}"
    if resume:
        train(config, run_dir, *resume)
        assert_same_training(run_dir, tmp_path / "whole")


def _strike(
    process: subprocess.Popen[str], victim: str, draws: random.Random, delay_s: float, within: str
) -> list[psutil.Process]:
    """Kill -9 the trainer, its collector, or what the collector started; returns its children.

    It comes while a process named ``within`` runs, if that is not empty.
    """
    end_s = time.monotonic() + delay_s
    children: list[psutil.Process] = []
    workers: list[psutil.Process] = []
    running: set[str] = set()
    while process.poll() is None and (
        time.monotonic() < end_s or not workers or (within and within not in running)
    ):
        time.sleep(0.02)
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children(recursive=True)
            collectors = [c for c in children if "bapo_megatron.rollout.collector" in c.cmdline()]
            workers = [w for c in collectors for w in c.children(recursive=True)]
            running = {worker.name() for worker in workers}
    if process.poll() is None:
        victims = {"trainer": [process], "collector": collectors, "worker": workers}
        with contextlib.suppress(psutil.NoSuchProcess):  # such as a sandbox
            draws.choice(victims[victim]).kill()
    return children
