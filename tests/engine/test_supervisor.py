"""Servers are started, watched, started again with growing pauses, and ended with their owner."""

import asyncio
import contextlib
import logging
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from bapo_megatron.engine.base import Readiness
from bapo_megatron.engine.sglang import server as sglang_server
from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.engine.sglang.server import own_servers
from bapo_megatron.engine.supervisor import ServerSupervisor, restart_wait_s
from bapo_megatron.errors import RolloutError
from tests.engine.helpers import ask, descendants
from tests.engine.sglang.servers import server_config
from tests.fakes.fake_launcher import shared_file
from tests.launch import REPOSITORY

KEYS = ApiKeys("api", "admin")
PATIENCE_S = 60
"""Longest wait for anything; machines are shared."""


@pytest.fixture
def fate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says what a starting server does (tests/fakes/fake_launcher.py)."""
    monkeypatch.setattr(sglang_server, "LAUNCHER", "tests.fakes.fake_launcher")
    monkeypatch.setattr("bapo_megatron.engine.supervisor._ASK_INTERVAL_S", 0.1)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    file = tmp_path / "fate"
    file.write_text("serve")
    return file


@contextlib.asynccontextmanager
async def supervised(
    fate: Path, *, min_ready: int | None = None, **rollout: Any
) -> AsyncIterator[ServerSupervisor]:
    """A supervisor of fake servers; nothing of them is left afterwards."""
    server = {"extra_args": [f"--fate={fate}"], "max_restart_wait_s": 1}
    server |= rollout.pop("server", {})
    config = server_config(fate.parent, fate.parent, seed=7, server=server, **rollout)
    servers = own_servers(config, "cpu", KEYS, awaits_weights=True)
    supervisor = ServerSupervisor(servers, config.rollout, min_ready)
    try:
        supervisor.start()
        yield supervisor
    finally:
        await supervisor.close()
        await supervisor.close()
    assert not descendants(mentioning=str(fate))


def process_of(supervisor: ServerSupervisor, index: int = 0) -> psutil.Process:
    port, deadline_s = supervisor.servers[index].port, time.monotonic() + PATIENCE_S
    while not (found := descendants(mentioning=f"--port={port}")):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)  # Popen returns a moment before the command line of a program can be read
    (process,) = found
    return process


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)


async def ready_after_starts(supervisor: ServerSupervisor, num_starts: int, index: int = 0) -> None:
    await until(lambda: supervisor.servers[index].num_starts == num_starts)
    async with asyncio.timeout(PATIENCE_S):
        await supervisor.wait_ready(lambda line: None)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_server_that_is_killed_before_it_was_ever_ready_leaves_no_shared_file(
    fate: Path,
) -> None:
    fate.write_text("load")
    pids: list[int] = []

    async with supervised(fate) as supervisor:
        (server,) = supervisor.servers
        process = process_of(supervisor)
        pids.append(process.pid)
        await until(shared_file(process.pid).exists)
        while await server.ask(PATIENCE_S) is not Readiness.BUSY:  # it listens a moment later
            await asyncio.sleep(0.02)
        process.kill()
        with pytest.raises(RolloutError, match="SIGKILL"):
            await supervisor.watch()
    assert not shared_file(pids[0]).exists()


async def test_a_server_that_is_killed_is_started_again_at_once_at_its_address_with_its_keys(
    fate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[str] = []

    async with supervised(fate, server={"count": 2}) as supervisor:
        await supervisor.wait_ready(lines.append)
        other, server = supervisor.servers
        assert other.port != server.port
        address = server.address
        left, killed = process_of(supervisor, 0), process_of(supervisor, 1)
        assert shared_file(killed.pid).exists()
        killed.kill()
        await ready_after_starts(supervisor, 2, index=1)
        assert not shared_file(killed.pid).exists()
        assert server.address == address
        assert ask(f"{address}/ready") == (200, "admin")  # it tells which key it was given
        assert supervisor.describe_failures() == ""
        (line,) = warnings(caplog)
        assert line.startswith(f"the SGLang server at {address} died (SIGKILL); ")
        assert (process_of(supervisor, 0), other.num_starts) == (left, 1)
        for number, seed in enumerate((7, 8)):
            server = supervisor.servers[number]
            assert server.log_path.name == f"sglang_{number}.log"
            assert f"--random-seed={seed}" in server.arguments()
            assert server.log_path.read_text().endswith("fate: serve; an api key: True\n")
        await asyncio.sleep(1.1)  # longer than max_restart_wait_s
        process_of(supervisor, 1).kill()
        await ready_after_starts(supervisor, 3, index=1)
        assert ["restarting (" in line for line in warnings(caplog)] == [True, True]
    assert lines
    assert all(re.fullmatch(r"starting servers: [01] of 2 ready, \d+ s", line) for line in lines)


@pytest.mark.parametrize("min_ready", [None, 2])
async def test_too_few_servers_that_get_ready_are_an_error_with_the_end_of_each_log(
    fate: Path, min_ready: int | None
) -> None:
    fate.write_text("serve exit exit" if min_ready else "exit")

    async with supervised(
        fate, min_ready=min_ready, server={"count": 3 if min_ready else 1}
    ) as supervisor:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(RolloutError) as caught:
                await supervisor.wait_ready(lambda line: None)
            with pytest.raises(RolloutError):
                await supervisor.watch()
        lines = str(caught.value).splitlines()
        reasons = [line for line in lines if "died" in line]
        for server, reason in zip(supervisor.servers[:2], reasons, strict=True):
            assert reason.startswith(f"the SGLang server at {server.address} died (exit status 3)")
            assert str(server.log_path) in reason
            assert min_ready or server.num_starts == 1
        assert lines[-1] == "    fate: exit; an api key: True"


async def test_a_failure_is_told_with_the_log_of_the_start_that_failed(fate: Path) -> None:
    fate.write_text("load")

    async with supervised(fate, min_ready=2, server={"count": 3}) as supervisor:
        first, second = supervisor.servers[:2]
        for server in (first, second):
            await until(lambda log=server.log_path: log.read_text().endswith("an api key: True\n"))
        left = process_of(supervisor, 0)
        fate.write_text("stuck")
        process_of(supervisor, 1).kill()
        await until(lambda: second.num_starts == 2)
        left.kill()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(RolloutError) as caught:
                await supervisor.watch()
        lines = str(caught.value).splitlines()
        assert [line for line in lines if line.startswith(" ")] == [
            "    fate: load; an api key: True"
        ] * 2


async def test_a_server_that_does_not_get_ready_in_time_is_an_error(fate: Path) -> None:
    fate.write_text("load")

    async with supervised(fate, server={"start_timeout_s": 0.5}) as supervisor:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(
                RolloutError, match=r"0\.5 s; raise rollout\.server\.start_timeout_s"
            ):
                await supervisor.wait_ready(lambda line: None)


@pytest.mark.slow
async def test_servers_beyond_a_quorum_may_die_before_they_were_ever_ready(
    fate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fate.write_text("serve exit serve")  # by the rest of seed / 3, hence the first one

    async with supervised(fate, min_ready=2, server={"count": 3}) as supervisor:
        async with asyncio.timeout(PATIENCE_S):
            await supervisor.wait_ready(lambda line: None)
        first, *_ = supervisor.servers
        await until(lambda: first.num_starts >= 2)
        assert f"{first.address} died (exit status 3)" in warnings(caplog)[0]
        assert first.address in supervisor.describe_failures()
        fate.write_text("serve")
        await until(lambda: supervisor.describe_failures() == "")

        fate.write_text("exit")  # those that were ready are started again like any others
        for index in range(3):
            process_of(supervisor, index).kill()
        await until(lambda: all(server.num_starts >= 4 for server in supervisor.servers[1:]))
        assert not any(task.done() for task in supervisor._tasks)
        lines = [line for line in warnings(caplog) if supervisor.servers[1].address in line]
        pauses = [line.partition("restarting")[2].partition(" (")[0] for line in lines]
        assert pauses[:3] == ["", " in 1 s", " in 1 s"]  # max_restart_wait_s


def test_pauses_double_up_to_the_longest() -> None:
    assert [restart_wait_s(n, max_s=10) for n in range(1, 8)] == [0, 1, 2, 4, 8, 10, 10]
    assert restart_wait_s(10_000, max_s=60) == 60


@pytest.mark.slow
@pytest.mark.parametrize("is_frozen", [True, False])
async def test_a_server_that_hangs_is_killed_and_started_again_also_where_its_http_still_answers(
    fate: Path, caplog: pytest.LogCaptureFixture, is_frozen: bool
) -> None:
    async with supervised(fate, health={"stuck_timeout_s": 0.5}) as supervisor:
        await supervisor.wait_ready(lambda line: None)
        hanging = process_of(supervisor)
        if is_frozen:
            hanging.send_signal(signal.SIGSTOP)
        else:
            fate.write_text("stuck")
            assert ask(f"{supervisor.servers[0].address}/ready")[0] == 200
        await until(lambda: bool(warnings(caplog)))
        fate.write_text("serve")
        await ready_after_starts(supervisor, 2)
        assert not hanging.is_running()
        assert " did not answer for 0.5 s (health.stuck_timeout_s); " in warnings(caplog)[0]


@pytest.mark.slow
async def test_while_restarts_are_held_nothing_is_started_and_a_port_that_is_taken_is_waited_for(
    fate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with supervised(fate) as supervisor:
        await supervisor.wait_ready(lambda line: None)
        await supervisor.hold_restarts()
        (server,) = supervisor.servers
        process_of(supervisor).kill()
        await until(lambda: not server.is_started)
        await asyncio.sleep(0.5)
        assert server.num_starts == 1
        with socket.socket() as occupant:
            occupant.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            occupant.bind(("127.0.0.1", server.port))
            occupant.listen()
            supervisor.allow_restarts()
            await until(lambda: len(warnings(caplog)) >= 2)
        assert "was not started (rollout.server: cannot listen on" in warnings(caplog)[1]
        await ready_after_starts(supervisor, 2)
