"""Runs whose episodes are played by an agent, killed at random moments."""

import contextlib
import os
import random
import time
from pathlib import Path

import psutil
import pytest

from bapo_megatron.data.dump import read_batch
from tests.launch import start
from tests.trainer.runs import assert_same_training, run_of_short_turns, train

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

AGENTS = "tests.agent.agents"
KILLS = int(os.environ.get("BAPO_TEST_KILLS", "1"))
"""More were tried by hand."""


@pytest.mark.exhaustive
def test_runs_of_agents_that_are_killed_equal_another_one(model_dir: Path, tmp_path: Path) -> None:
    rollout = {
        "agent": f"{AGENTS}:wanders",
        "agent_sandbox": None,
        "max_response_tokens": 64,
    }
    reward = {"name": "even", "function": f"{AGENTS}:even"}
    config = run_of_short_turns(tmp_path, model_dir, rollout, reward)
    start_s = time.monotonic()
    rows = train(config, tmp_path / "whole")
    whole_s = time.monotonic() - start_s
    assert rows[-1]["rollout/turns_mean"] > 1
    assert rows[-1]["rollout/agent_forks_share"] == 0
    batch = read_batch(tmp_path / "whole" / "rollouts" / "step_000002.parquet")
    assert any(sample.branches for sample in batch.samples)
    draws = random.Random(0)
    for kill in range(KILLS):
        resume = ["--resume"] if kill else []
        process = start(["train", str(config), f"run_dir={tmp_path / 'killed'}", *resume])
        end_s = time.monotonic() + draws.uniform(0.2, 0.9) * whole_s
        children: list[psutil.Process] = []
        while process.poll() is None and time.monotonic() < end_s:
            time.sleep(0.1)
            with contextlib.suppress(psutil.NoSuchProcess):  # the run has ended before
                children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate()
        assert psutil.wait_procs(children, timeout=30)[1] == []
    train(config, tmp_path / "killed", "--resume")
    assert_same_training(tmp_path / "killed", tmp_path / "whole")
