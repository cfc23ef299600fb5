"""Engines on the trainer's GPUs: the order of calls, and what becomes of those that fail."""

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from bapo_megatron.engine.base import MemoryPart
from bapo_megatron.errors import RolloutError, ServerGoneError
from bapo_megatron.rollout.client import CollectorClient
from bapo_megatron.rollout.messages import RELEASE_MEMORY
from bapo_megatron.rollout.servers import ColocatedServers
from tests.engine.helpers import MakeConfig

ALL = frozenset(MemoryPart)


@dataclass(eq=False)
class FakeServer:
    """A server, its engine, and the pool's entry; it dies of what a server may die of."""

    events: list[str]
    """What happened, to all servers of a test and around them."""
    number: int = 0
    is_busy: bool = False
    """A request is being worked on, whatever is aborted."""
    answers_release: bool = True
    held: frozenset[MemoryPart] = ALL
    is_started: bool = True
    num_starts: int = 1
    log_path: Path = Path("server.log")

    @property
    def engine(self) -> Self:
        return self

    @property
    def address(self) -> str:
        return f"http://server-{self.number}"

    async def release_memory(self, timeout_s: float) -> None:
        assert timeout_s == 1.0
        self.events.append("release")
        await asyncio.sleep(0)
        if self.is_busy:
            raise RolloutError(f"{self.address}: is still busy")
        if not self.answers_release:
            self.is_started = False
            raise ServerGoneError(f"{self.address}: no answer")
        self.held = frozenset()

    async def take_memory(self, part: MemoryPart, timeout_s: float) -> None:
        assert timeout_s == 1.0
        self.events.append(f"take {part.value}")
        await asyncio.sleep(0)
        assert part not in self.held
        self.held |= {part}

    def kill(self) -> None:
        self.events.append("kill")
        self.is_started = False

    def restart(self) -> None:
        self.is_started, self.held = True, ALL
        self.num_starts += 1


class Surroundings:
    """Stands in for supervisor, pool and generation, and writes down what is asked of them."""

    def __init__(self, num_servers: int = 1) -> None:
        self.states = self
        self.events: list[str] = []
        self.servers = [FakeServer(self.events, number) for number in range(num_servers)]
        self.engines = self.servers
        self.memory_is_released = False
        self.lost: list[FakeServer] = []
        stand_in: Any = self
        self.colocated = ColocatedServers(stand_in, stand_in, stand_in, timeout_s=1.0)

    async def hold_restarts(self) -> None:
        self.events.append("hold_restarts")

    def allow_restarts(self) -> None:
        self.events.append("allow_restarts")

    async def drain(self) -> None:
        self.events.append("drain")

    def mark_lost(self, engine: FakeServer, reason: str) -> None:
        self.lost.append(engine)
        assert engine.address in reason

    async def pause(self) -> bool:
        self.events.append("pause")
        return True

    async def resume(self) -> None:
        self.events.append("resume")


async def test_an_idle_server_releases_its_memory_and_gets_it_back_around_the_new_weights() -> None:
    around = Surroundings()
    [server], servers = around.servers, around.colocated
    for _ in range(2):
        await servers.release()
        assert server.held == set()
        assert around.memory_is_released
        around.events.append("train")
        await servers.pause()
        assert server.held == {MemoryPart.WEIGHTS}
        assert around.memory_is_released
        around.events.append("new weights")
        await servers.resume()
        assert not around.memory_is_released
    before_training = ["hold_restarts", "drain", "release", "train"]
    around_weights = ["pause", "take weights", "allow_restarts", "new weights"]
    assert around.events == [*before_training, *around_weights, "take cache", "resume"] * 2


async def test_new_weights_without_a_release_before_ask_the_servers_for_nothing() -> None:
    around = Surroundings()
    await around.colocated.pause()
    await around.colocated.resume()
    assert around.events == ["pause", "allow_restarts", "resume"]


async def test_a_busy_server_ends_the_run_and_lives() -> None:
    around = Surroundings(2)
    busy, idle = around.servers
    busy.is_busy = True
    with pytest.raises(RolloutError, match="http://server-0: is still busy"):
        await around.colocated.release()
    assert busy.is_started
    assert (busy.held, idle.held) == (ALL, set())


async def test_memory_is_given_back_to_the_process_that_released_it_only() -> None:
    around = Surroundings(3)
    restarted, ended, kept = around.servers
    await around.colocated.release()
    restarted.restart()
    ended.is_started = False
    around.events.clear()
    await around.colocated.pause()
    await around.colocated.resume()
    assert restarted.is_started
    assert kept.held == ALL
    assert [event for event in around.events if "take" in event] == ["take weights", "take cache"]


async def test_a_server_that_fails_is_killed_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    around = Surroundings(2)
    failing, good = around.servers
    failing.answers_release = False
    await around.colocated.release()
    assert good.held == set()
    failing.restart()
    await around.colocated.pause()
    await around.colocated.resume()
    assert around.lost == [failing]
    assert around.events.count("kill") == 1
    assert failing.held == good.held == ALL
    assert "http://server-0: no answer; killing it (server.log)" in caplog.text


@pytest.mark.parametrize(("grown_by", "is_refused"), [(30_000_000_000, False), (2_000_000, True)])
def test_a_release_that_frees_nothing_on_the_gpu_of_rank_zero_ends_the_run(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, grown_by: int, is_refused: bool
) -> None:
    free = iter([1_000_000_000, 1_000_000_000 + grown_by])
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (next(free), 80_000_000_000))
    client = CollectorClient(make_config(colocated=True), on_progress=lambda _: None)
    called: list[Any] = []
    monkeypatch.setattr(client, "wait_ready", lambda: called.append("wait_ready"))
    monkeypatch.setattr(client, "_call", lambda *call: called.append(call))
    with (
        pytest.raises(RolloutError, match=r"^rollout\.colocated: .* 0\.00 GB")
        if is_refused
        else contextlib.nullcontext()
    ):
        client.release_memory()
    assert called == ["wait_ready", (RELEASE_MEMORY, None)]
    assert client._lacks_weights
