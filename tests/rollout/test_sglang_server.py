"""Starting, watching and ending a server's processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from bapo_megatron.config.megatron import ModelConfig
from bapo_megatron.config.schema import ServerConfig
from bapo_megatron.rollout.base import RolloutError
from bapo_megatron.rollout.processes import child_environment, end_group, tail
from bapo_megatron.rollout.sglang_server import SglangServer
from tests.launch import free_port
from tests.rollout.helpers import descendants

if TYPE_CHECKING:
    from tests.rollout.helpers import MakeConfig

OWNER = """
import os, sys, time
from pathlib import Path
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.rollout.collector_client import CollectorClient
config = RunConfig.model_validate_json(Path(sys.argv[1]).read_text())
client = CollectorClient(config, on_progress=print)
client.start()
if os.fork() == 0:  # as checkpoint writers are: a process that holds the same pipes and sockets
    time.sleep(60)
    os._exit(0)
client.wait_ready()
"""


def _server(model_dir: Path, run_dir: Path, device: str = "cpu", **config: object) -> SglangServer:
    return SglangServer(
        ModelConfig(path=model_dir, dtype="float32"),
        ServerConfig.model_validate(config),
        run_dir=run_dir,
        seed=4,
        device=device,
    )


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    port = free_port()
    with socket.socket() as occupant:
        occupant.bind(("127.0.0.1", port))
        occupant.listen()
        server = _server(tmp_path, tmp_path, port=port)
        with pytest.raises(
            RolloutError, match=r"rollout\.server\.port: cannot listen on"
        ) as caught:
            server.start()
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert "in use" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "logs").exists()
    server.close()


def test_with_a_gpu_no_cpu_argument_is_given(tmp_path: Path) -> None:
    on_gpu = _server(tmp_path, tmp_path, device="cuda", tensor=2, max_running_requests=16)
    on_cpu = _server(tmp_path, tmp_path, device="cpu", extra_args=("--log-requests",))
    cpu_only = {
        "--device=cpu",
        "--attention-backend=torch_native",
        "--sampling-backend=pytorch",
        "--disable-overlap-schedule",
        "--disable-cuda-graph",
        "--grammar-backend=none",
    }
    assert cpu_only <= set(on_cpu.arguments())
    assert not cpu_only & set(on_gpu.arguments())
    assert {"--tensor-parallel-size=2", "--max-running-requests=16"} <= set(on_gpu.arguments())
    # Without a limit it would take most of the memory that it shares with the trainer.
    assert "--max-total-tokens=65536" in on_cpu.arguments()
    assert not any("--max-total-tokens" in argument for argument in on_gpu.arguments())
    assert on_cpu.arguments()[-1] == "--log-requests"
    for server in (on_gpu, on_cpu):
        assert {"--host=127.0.0.1", "--dtype=float32", "--random-seed=4", "--sleep-on-idle"} <= set(
            server.arguments()
        )


def test_a_child_does_not_see_what_torchrun_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    environment = child_environment()
    assert not {"RANK", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} & environment.keys()
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["BAPO_MEGATRON_OWNER_PID"] == str(os.getpid())


def test_the_last_lines_of_a_log_are_shown_without_progress_bars(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    lines = [f"line {number}" for number in range(20)]
    log.write_bytes(b"\n".join(line.encode() for line in lines) + b"\n10%\r50%\rdone\n\n\xff\n")
    shown = tail(log).splitlines()
    assert shown[0] == "    line 10"
    assert shown[-2:] == ["    done", "    \ufffd"]
    assert len(shown) == 12
    assert tail(tmp_path / "none.log") == "    (no log)"


def test_a_group_that_ignores_the_request_to_end_is_killed(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/child; trap '' TERM; wait"
    process = subprocess.Popen(["sh", "-c", script], start_new_session=True)
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        time.sleep(0.01)
    end_group(process, grace_s=0.1)
    assert process.returncode == -signal.SIGKILL
    child_pid = int((tmp_path / "child").read_text())
    if psutil.pid_exists(child_pid):
        assert psutil.Process(child_pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.sglang
def test_a_server_that_dies_at_start_shows_its_last_lines(model_dir: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    with _server(model_dir, tmp_path, extra_args=("--no-such-argument",)) as server:
        with pytest.raises(RolloutError) as caught:
            server.wait_ready(lines.append)
        first, *log = str(caught.value).splitlines()
    assert first.startswith(f"the SGLang server at {server.address} died (exit status 2)")
    assert str(tmp_path / "logs" / "sglang.log") in first
    assert "unrecognized arguments: --no-such-argument" in log[-1]
    assert lines[0].startswith("starting the SGLang server: ")
    assert not descendants(mentioning=str(tmp_path))


@pytest.mark.sglang
def test_a_server_that_takes_too_long_is_ended(model_dir: Path, tmp_path: Path) -> None:
    with (
        _server(model_dir, tmp_path, start_timeout_s=1.0) as server,
        pytest.raises(RolloutError, match=r"did not answer within 1 s; raise rollout.server.start"),
    ):
        server.wait_ready(lambda line: None)
    assert not descendants(mentioning=str(tmp_path))


@pytest.mark.sglang
def test_no_process_outlives_an_owner_that_is_killed(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(make_config().model_dump_json())
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(config)], stdout=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 120
        while not _has_everything(descendants(owner.pid)):
            assert owner.poll() is None
            assert time.monotonic() < deadline_s, descendants(owner.pid)
            time.sleep(0.2)
        command_line = psutil.Process(owner.pid).cmdline()
        started = descendants(owner.pid)
        forked = {process for process in started if process.cmdline() == command_line}
        assert len(forked) == 1
    finally:
        owner.kill()
        owner.wait()
    assert not psutil.wait_procs(started - forked, timeout=20)[1]
    for process in forked:
        process.kill()


def _has_everything(started: set[psutil.Process]) -> bool:
    """Collector and launcher run, and the launcher has spawned the server's other processes."""
    lines = [" ".join(process.cmdline()) for process in started if process.is_running()]
    spawned = [line for line in lines if "spawn_main" in line or "sglang::" in line]
    return any("rollout.collector" in line for line in lines) and len(spawned) >= 2
