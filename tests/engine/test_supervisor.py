"""Servers are started, watched, started again with growing pauses, and ended with their owner."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import socket
import time
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.engine.base import Readiness
from bapo_megatron.engine.sglang import server as sglang_server
from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.engine.sglang.server import own_servers
from bapo_megatron.engine.supervisor import ServerSupervisor, restart_wait_s
from bapo_megatron.errors import RolloutError
from tests.engine.helpers import descendants
from tests.fakes.fake_launcher import shared_file
from tests.launch import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path
    from typing import Any

    Use = Callable[[ServerSupervisor], Awaitable[None]]

KEYS = ApiKeys("api", "admin")
STARTING = r"starting the SGLang server at http://127\.0\.0\.1:\d+: \d+ s"
PATIENCE_S = 60
"""Longest wait for anything; machines are shared."""


@pytest.fixture
def fate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says what a starting server does (tests/fakes/fake_launcher.py)."""
    monkeypatch.setattr(sglang_server, "LAUNCHER", "tests.fakes.fake_launcher")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    file = tmp_path / "fate"
    file.write_text("serve")
    return file


def supervise(fate: Path, use: Use, *, min_ready: int | None = None, **rollout: Any) -> None:
    """Run ``use`` with a supervisor of fake servers; nothing of them is left afterwards."""
    server = {
        "extra_args": [f"--fate={fate}"],
        "max_restart_wait_s": 1,
        **rollout.pop("server", {}),
    }

    config = RunConfig.model_validate(
        {
            "name": "test",
            "run_dir": fate.parent,
            "seed": 7,
            "model": {"path": fate.parent},
            "rollout": {"server": server, **rollout},
        }
    )

    async def run() -> None:
        servers = own_servers(config, "cpu", KEYS, awaits_weights=True)
        supervisor = ServerSupervisor(servers, config.rollout, min_ready)
        try:
            supervisor.start()
            await use(supervisor)
        finally:
            await supervisor.close()
            await supervisor.close()

    asyncio.run(run())
    assert not descendants(mentioning=str(fate))


def process_of(supervisor: ServerSupervisor, index: int = 0) -> psutil.Process:
    port = supervisor.servers[index].port
    (process,) = descendants(mentioning=f"--port={port}")
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


def test_a_server_that_is_killed_before_it_was_ever_ready_leaves_no_shared_file(
    fate: Path,
) -> None:
    fate.write_text("load")
    pids: list[int] = []

    async def use(supervisor: ServerSupervisor) -> None:
        (server,) = supervisor.servers
        process = process_of(supervisor)
        pids.append(process.pid)
        await until(shared_file(process.pid).exists)
        while await server.ask(PATIENCE_S) is not Readiness.BUSY:  # it listens a moment later
            await asyncio.sleep(0.02)
        process.kill()
        with pytest.raises(RolloutError, match="SIGKILL"):
            await supervisor.watch()

    supervise(fate, use)
    assert not shared_file(pids[0]).exists()


def test_a_server_that_is_killed_is_started_again_at_its_address_with_its_keys(
    fate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[str] = []

    async def use(supervisor: ServerSupervisor) -> None:
        await supervisor.wait_ready(lines.append)
        (server,) = supervisor.servers
        address, log_path = server.address, server.log_path
        killed = process_of(supervisor)
        assert shared_file(killed.pid).exists()
        killed.kill()
        await ready_after_starts(supervisor, 2)
        assert not shared_file(killed.pid).exists()
        assert server.address == address
        reply = httpx.get(f"{address}/ready", trust_env=False)
        assert reply.text == "admin"  # the fake tells which key it was given
        assert supervisor.describe_failures() == ""
        assert warnings(caplog) == [
            f"the SGLang server at {address} died (SIGKILL); it is started again ({log_path})"
        ]

    supervise(fate, use)
    assert lines
    assert all(re.fullmatch(STARTING, line) for line in lines)


def test_servers_have_ports_gpus_seeds_and_logs_of_their_own(fate: Path) -> None:
    lines: list[str] = []

    async def use(supervisor: ServerSupervisor) -> None:
        await supervisor.wait_ready(lines.append)
        first, second = supervisor.servers
        assert first.port != second.port
        assert [server.log_path.name for server in (first, second)] == [
            "sglang_0.log",
            "sglang_1.log",
        ]
        assert first.log_path.read_text().endswith("fate: serve; an api key: True\n")
        seeds = [[a for a in s.arguments() if "seed" in a] for s in (first, second)]
        assert seeds == [["--random-seed=7"], ["--random-seed=8"]]

    supervise(fate, use, server={"count": 2})
    assert lines[0].startswith("starting 2 servers: 0 ready, ")


def test_the_other_server_is_left_alone(fate: Path) -> None:
    async def use(supervisor: ServerSupervisor) -> None:
        await supervisor.wait_ready(lambda line: None)
        other = process_of(supervisor, 0)
        process_of(supervisor, 1).kill()
        await ready_after_starts(supervisor, 2, index=1)
        assert process_of(supervisor, 0) == other
        assert supervisor.servers[0].num_starts == 1

    supervise(fate, use, server={"count": 2})


def test_a_server_that_is_never_ready_is_an_error_with_the_end_of_its_log(fate: Path) -> None:
    fate.write_text("exit")

    async def use(supervisor: ServerSupervisor) -> None:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(RolloutError) as caught:
                await supervisor.wait_ready(lambda line: None)
            with pytest.raises(RolloutError):
                await supervisor.watch()
        first, *log = str(caught.value).splitlines()
        (server,) = supervisor.servers
        assert first == (
            f"the SGLang server at {server.address} died (exit status 3); the last lines of "
            f"{server.log_path} say why:"
        )
        assert log[-1] == "    fate: exit; an api key: True"
        assert server.num_starts == 1

    supervise(fate, use)


def test_a_server_that_does_not_get_ready_in_time_is_an_error(fate: Path) -> None:
    fate.write_text("load")

    async def use(supervisor: ServerSupervisor) -> None:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(
                RolloutError, match=r"did not answer within 0.5 s; raise rollout.server.start_tim"
            ):
                await supervisor.wait_ready(lambda line: None)

    supervise(fate, use, server={"start_timeout_s": 0.5})


def test_servers_beyond_a_quorum_may_die_before_they_were_ever_ready(
    fate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fate.write_text("serve exit serve")  # by the rest of seed / 3, hence the first one

    async def use(supervisor: ServerSupervisor) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await supervisor.wait_ready(lambda line: None)
        first, *_ = supervisor.servers
        await until(lambda: first.num_starts >= 2)
        assert warnings(caplog)[0] == (
            f"the SGLang server at {first.address} died (exit status 3); it is started again "
            f"({first.log_path})"
        )
        assert first.address in supervisor.describe_failures()
        fate.write_text("serve")
        await until(lambda: supervisor.describe_failures() == "")

        fate.write_text("exit")  # those that were ready are started again like any others
        for index in range(3):
            process_of(supervisor, index).kill()
        await until(lambda: all(server.num_starts >= 3 for server in supervisor.servers[1:]))
        assert not any(task.done() for task in supervisor._tasks)

    supervise(fate, use, min_ready=2, server={"count": 3})


def test_a_quorum_that_cannot_come_is_an_error_with_the_end_of_each_log(fate: Path) -> None:
    fate.write_text("serve exit exit")

    async def use(supervisor: ServerSupervisor) -> None:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(RolloutError) as caught:
                await supervisor.wait_ready(lambda line: None)
        lines = str(caught.value).splitlines()
        assert lines[0] == (
            "rollout.min_servers: 2 of 3 servers must get ready, but 2 ended; lower it, or see why:"
        )
        reasons = [line for line in lines if line.startswith("the SGLang server at ")]
        for server, reason in zip(supervisor.servers[:2], reasons, strict=True):
            assert reason.startswith(f"the SGLang server at {server.address} died (exit status 3)")

    supervise(fate, use, min_ready=2, server={"count": 3})


@pytest.mark.slow
def test_a_server_that_keeps_dying_is_started_again_after_pauses(
    fate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(supervisor: ServerSupervisor) -> None:
        await supervisor.wait_ready(lambda line: None)
        fate.write_text("exit")
        process_of(supervisor).kill()
        await until(lambda: len(warnings(caplog)) >= 3)
        (server,) = supervisor.servers
        first, *log = supervisor.describe_failures().splitlines()
        assert first.startswith(
            f"the SGLang server at {server.address} died (exit status 3), 3 times in a row; the "
        )
        assert log[-1] == "    fate: exit; an api key: True"
        assert [line.split("; ")[1].partition(" (")[0] for line in warnings(caplog)][:3] == [
            "it is started again",
            "it is started again in 1 s",
            "it is started again in 1 s",  # max_restart_wait_s
        ]
        fate.write_text("serve")
        async with asyncio.timeout(PATIENCE_S):
            await supervisor.wait_ready(lambda line: None)
        assert supervisor.describe_failures() == ""

    supervise(fate, use)


def test_pauses_double_up_to_the_longest() -> None:
    assert [restart_wait_s(n, max_s=10) for n in range(1, 8)] == [0, 1, 2, 4, 8, 10, 10]
    assert restart_wait_s(10_000, max_s=60) == 60


@pytest.mark.slow
def test_after_a_while_without_failure_a_server_is_started_again_at_once(
    fate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(supervisor: ServerSupervisor) -> None:
        await supervisor.wait_ready(lambda line: None)
        for num_starts in (2, 3):
            await asyncio.sleep(1.5)  # longer than max_restart_wait_s
            process_of(supervisor).kill()
            await ready_after_starts(supervisor, num_starts)
        assert len(warnings(caplog)) == 2
        assert all("it is started again (" in line for line in warnings(caplog))

    supervise(fate, use)


@pytest.mark.slow
@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_server_that_hangs_is_killed_and_started_again_also_where_its_http_still_answers(
    fate: Path, caplog: pytest.LogCaptureFixture, is_frozen: bool
) -> None:
    async def use(supervisor: ServerSupervisor) -> None:
        await supervisor.wait_ready(lambda line: None)
        hanging = process_of(supervisor)
        if is_frozen:
            hanging.send_signal(signal.SIGSTOP)
        else:
            fate.write_text("stuck")
            reply = httpx.get(f"{supervisor.servers[0].address}/ready", trust_env=False)
            assert reply.status_code == 200
        await until(lambda: bool(warnings(caplog)))
        fate.write_text("serve")
        await ready_after_starts(supervisor, 2)
        assert not hanging.is_running()
        assert " gave no answer for 0.5 s (health.stuck_timeout_s); it is " in warnings(caplog)[0]

    supervise(fate, use, health={"stuck_timeout_s": 0.5})


@pytest.mark.slow
def test_a_port_that_is_taken_meanwhile_is_waited_for(
    fate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(supervisor: ServerSupervisor) -> None:
        await supervisor.wait_ready(lambda line: None)
        await supervisor.hold_restarts()
        (server,) = supervisor.servers
        process_of(supervisor).kill()
        await until(lambda: not server.is_started)
        with socket.socket() as occupant:
            occupant.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            occupant.bind(("127.0.0.1", server.port))
            occupant.listen()
            supervisor.allow_restarts()
            await until(lambda: len(warnings(caplog)) >= 2)
        assert "was not started (rollout.server.port: cannot listen on" in warnings(caplog)[1]
        await ready_after_starts(supervisor, 2)

    supervise(fate, use)


def test_while_restarts_are_held_nothing_is_started(
    fate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(supervisor: ServerSupervisor) -> None:
        await supervisor.wait_ready(lambda line: None)
        await supervisor.hold_restarts()
        process_of(supervisor).kill()
        await until(lambda: len(warnings(caplog)) == 1)
        await asyncio.sleep(1)
        assert supervisor.servers[0].num_starts == 1
        supervisor.allow_restarts()
        await ready_after_starts(supervisor, 2)

    supervise(fate, use)
