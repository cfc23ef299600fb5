"""Servers and trainers that end while samples are on their way: nothing is lost.

One run is followed through three processes: one is interrupted after faults of its real server, the
next one loses a fake one for good, the last one goes on to the end with another fake.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from bapo_megatron.engine.sglang.keys import ADMIN_API_KEY_VARIABLE, API_KEY_VARIABLE, ApiKeys
from tests.fakes.fake_server import BrokenError
from tests.fakes.fake_sglang import FakeSglang
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

SHORT = "rollout.max_response_tokens=64"
pytestmark = [pytest.mark.sglang, pytest.mark.distributed, pytest.mark.slow, pytest.mark.exhaustive]


@dataclass(frozen=True)
class Interrupted:
    """A run whose server failed, and which was interrupted then."""

    config: Path
    run_dir: Path
    return_code: int
    err: str
    left_behind: list[psutil.Process]
    """What it had started and still runs."""
    new_servers_from: int
    """How many steps had been made when the new server came."""


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Interrupted:
    """The server hangs for a while, and is killed later."""
    directory = tmp_path_factory.mktemp("faults")
    # A step changes log-probs by far more than their error; with one update all tokens count.
    config = write_config(
        directory,
        model_dir,
        algorithm={"entropy_coefficient": 0.01},
        optimizer={"lr": 1e-3},
        reward={"workers": 1},
    )
    run_dir = directory / "run"
    log = run_dir / "logs" / "collector.log"

    def num_returns() -> int:
        return log.read_text().count("needs weights")

    process = start(["train", str(config), "rollout.server.count=1", SHORT, "train.steps=1000"])
    try:
        wait_for(process, lambda: len(steps(run_dir)) >= 1, "the first step")
        (server,) = servers(process)
        signal_server(server, signal.SIGSTOP)
        wait_for(process, lambda: "is lost" in log.read_text(), "the time-out")
        returns = num_returns()
        signal_server(server, signal.SIGCONT)
        wait_for(process, lambda: num_returns() > returns, "its return")
        num_steps = len(steps(run_dir))
        wait_for(process, lambda: len(steps(run_dir)) >= num_steps + 1, "a step after that")
        returns = num_returns()
        signal_server(server, signal.SIGKILL)
        wait_for(process, lambda: num_returns() > returns, "a new server")
        num_steps = len(steps(run_dir))
        wait_for(process, lambda: len(steps(run_dir)) >= num_steps + 3, "steps with the new one")
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    alive = psutil.wait_procs(children, timeout=30)[1]
    return Interrupted(config, run_dir, process.returncode, err, alive, num_steps)


def test_a_run_outlives_a_server_that_hangs_for_a_while_and_its_death(
    interrupted: Interrupted,
) -> None:
    rows = steps(interrupted.run_dir)
    assert "died (SIGKILL); restarting (" in interrupted.err
    # Every step was made once, and what the server lost was sampled again.
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert sum(row["rollout/lost_requests"] for row in rows) > 0
    # Servers that return have the trainer's weights, not those that they started with. Only tokens
    # of the newest weights can be compared.
    fresh = [row for row in rows[interrupted.new_servers_from :] if row["mismatch/tokens"] > 0]
    assert fresh
    for row in fresh:
        assert 0 < row["mismatch/logprob_abs_max"] <= 1e-4


def test_an_interrupted_run_leaves_neither_processes_nor_unfinished_files(
    interrupted: Interrupted,
) -> None:
    assert interrupted.return_code != 0
    assert not interrupted.left_behind
    # A checkpoint may have been under way: the next save removes what there is of it.
    unfinished = interrupted.run_dir.rglob("*.tmp")
    assert not [path for path in unfinished if "checkpoints" not in path.parts]


LOAD = "/update_weights_from_disk"
KEYS = ApiKeys("key-of-a-user-01", "key-of-the-admin")


@dataclass
class Mortal(FakeSglang):
    """Dies of a request when it is time."""

    is_time: Callable[[], bool] = lambda: False

    def generate(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self.is_time():
            threading.Thread(target=self.crash).start()
            raise BrokenError
        return super().generate(body)


def test_a_resumed_run_without_servers_saves_and_ends_and_resumes_to_its_end(
    interrupted: Interrupted,
) -> None:
    run_dir = interrupted.run_dir
    # Not ahead: every step asks for new samples, once the saved groups are used up.
    settings = ["rollout.async_steps=0", "rollout.weight_sync={method: disk, verify: none}"]
    settings += ["checkpoint.every_steps=1000", "rollout.health.patience_s=3"]
    keys = {API_KEY_VARIABLE: KEYS.api_key, ADMIN_API_KEY_VARIABLE: KEYS.admin_api_key}
    resumed = ["train", str(interrupted.config), "--resume", SHORT, *settings]
    num_steps = len(steps(run_dir))
    with Mortal(keys=KEYS, is_time=lambda: len(steps(run_dir)) >= num_steps + 2) as fake:
        served = [f"rollout.servers=[{fake.address}]", "train.steps=1000"]
        result = run([*resumed, *served], environment=keys)
    assert result.returncode == 1, result.stderr
    # For 3 s, while samples or new weights waited for a server.
    assert "rollout.health.patience_s" in result.stderr, result.stderr
    assert "continue with resume=true" in result.stderr
    saved = len(steps(run_dir))
    assert saved >= num_steps + 2
    assert assert_balanced(run_dir)["trained"] == saved * GROUPS_PER_STEP

    with FakeSglang(keys=KEYS) as fake:
        served = [f"rollout.servers=[{fake.address}]", f"train.steps={saved + 2}"]
        result = run([*resumed, *served], environment=keys)
    assert result.returncode == 0, result.stderr
    assert [row["step"] for row in steps(run_dir)] == list(range(1, saved + 3))
    assert assert_balanced(run_dir)["trained"] == (saved + 2) * GROUPS_PER_STEP
    # It had started with the model's first weights.
    assert fake.calls.index(LOAD) < fake.calls.index("/generate")
