"""Servers that share the trainer's GPUs: the order of calls, and that no busy one is released."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx
import pytest

from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.errors import RolloutError
from bapo_megatron.rollout.colocated import ColocatedServers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bapo_megatron.engine.sglang.server import SglangServer

RELEASE = ("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
RESUME_WEIGHTS = ("/resume_memory_occupation", {"tags": ["weights"]})
RESUME_CACHE = ("/resume_memory_occupation", {"tags": ["kv_cache"]})


@dataclass(eq=False)
class FakeServer:
    """Process and HTTP of a server; it dies of what SGLang dies of."""

    events: list[tuple[str, Any]]
    """What happened, to all servers of a test and around them."""
    is_busy: bool = False
    """A request is being worked on, whatever is aborted."""
    answers_release: bool = True
    held: set[str] = field(default_factory=lambda: {"kv_cache", "weights"})
    is_paused: bool = False
    is_started: bool = True
    num_starts: int = 1
    log_path: Path = Path("sglang.log")
    keys: ApiKeys = field(default_factory=lambda: ApiKeys("api", "admin"))
    status: int = 200

    def __enter__(self) -> Self:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.headers["Authorization"] == "Bearer admin"
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = fake.answer(self.path, body)
                if answer is None:
                    return
                self.send_response(answer)
                self.end_headers()
                self.wfile.write(b"Timed out waiting for idle state." if answer == 400 else b"null")

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def answer(self, path: str, body: dict[str, Any]) -> int | None:
        """The status of the answer; none after a crash."""
        self.events.append((path, body))
        if path == "/pause_generation":
            self.is_paused = body == {"mode": "abort"}
        elif path.startswith("/flush_cache"):
            assert path == "/flush_cache?timeout=0.5"
            return 400 if self.is_busy else 200
        elif path == "/release_memory_occupation":
            if self.is_busy or not self.is_paused or not self.answers_release:
                return self.crash()
            self.held -= set(body["tags"])
        elif path == "/resume_memory_occupation":
            if self.held & set(body["tags"]):
                return self.crash()
            self.held |= set(body["tags"])
        elif path == "/continue_generation":
            assert self.held == {"kv_cache", "weights"}
            self.is_paused = False
        return 200

    def crash(self) -> None:
        self.is_started = False

    def kill(self) -> None:
        self.events.append(("kill", None))
        self.is_started = False

    def restart(self) -> None:
        self.is_started, self.is_paused, self.held = True, False, {"kv_cache", "weights"}
        self.num_starts += 1


class Surroundings:
    """Stands in for supervisor, pool and generation, and writes down what is asked of them."""

    def __init__(self, servers: Sequence[FakeServer], events: list[tuple[str, Any]]) -> None:
        self.servers = servers
        self.engines = servers  # the pool's; they have an address
        self.events = events
        self.lost: list[FakeServer] = []

    async def hold_restarts(self) -> None:
        self.events.append(("hold_restarts", None))

    def allow_restarts(self) -> None:
        self.events.append(("allow_restarts", None))

    async def drain(self) -> None:
        self.events.append(("drain", None))

    def mark_lost(self, engine: FakeServer, reason: str) -> None:
        self.lost.append(engine)
        assert engine.address in reason

    async def pause(self) -> bool:
        self.events.append(("pause", None))
        return True

    async def resume(self) -> None:
        self.events.append(("resume", None))


def colocated(around: Surroundings) -> ColocatedServers:
    any_around: Any = around
    return ColocatedServers(any_around, any_around, around, timeout_s=1.0)


def test_a_cycle_releases_an_idle_server_and_gives_it_its_memory_back_around_the_new_weights() -> (
    None
):
    events: list[tuple[str, Any]] = []
    with FakeServer(events) as server:

        async def cycle() -> None:
            servers = colocated(Surroundings([server], events))
            for _ in range(2):
                await servers.release()
                assert server.held == set()
                events.append(("train", None))
                await servers.pause()
                assert server.held == {"weights"}
                events.append(("new weights", None))
                await servers.resume()

        asyncio.run(cycle())
    one_cycle = [
        ("hold_restarts", None),
        ("drain", None),
        ("/pause_generation", {"mode": "abort"}),
        ("/flush_cache?timeout=0.5", {}),
        RELEASE,
        ("train", None),
        ("pause", None),
        RESUME_WEIGHTS,
        ("allow_restarts", None),
        ("new weights", None),
        RESUME_CACHE,
        ("/continue_generation", {}),
        ("resume", None),
    ]
    assert events == one_cycle * 2


def test_new_weights_without_a_release_before_ask_the_servers_for_nothing() -> None:
    events: list[tuple[str, Any]] = []
    with FakeServer(events) as server:

        async def sync() -> None:
            servers = colocated(Surroundings([server], events))
            await servers.pause()
            await servers.resume()

        asyncio.run(sync())
    assert [name for name, _ in events] == ["pause", "allow_restarts", "resume"]


def test_a_busy_server_is_never_released() -> None:
    events: list[tuple[str, Any]] = []
    with FakeServer(events, is_busy=True) as busy, FakeServer(events) as idle:

        async def release() -> None:
            await colocated(Surroundings([busy, idle], events)).release()

        with pytest.raises(RolloutError) as caught:
            asyncio.run(release())
        assert str(caught.value) == (
            f"{busy.address}: is still busy 0.5 s after its requests were aborted (Timed out "
            "waiting for idle state.); its memory is not released, which would crash it. See "
            "sglang.log, and continue with resume=true"
        )
        assert busy.is_started
        assert busy.held == {"kv_cache", "weights"}
        assert events.count(RELEASE) == 1  # of the idle one


def test_memory_is_given_back_to_the_process_that_released_it_only() -> None:
    events: list[tuple[str, Any]] = []
    with FakeServer(events) as restarted, FakeServer(events) as ended, FakeServer(events) as kept:

        async def cycle() -> None:
            servers = colocated(Surroundings([restarted, ended, kept], events))
            await servers.release()
            restarted.restart()
            ended.crash()
            events.clear()
            await servers.pause()
            await servers.resume()

        asyncio.run(cycle())
        assert restarted.is_started
        assert kept.held == {"kv_cache", "weights"}
    assert [event for event in events if "memory" in event[0]] == [RESUME_WEIGHTS, RESUME_CACHE]


def test_a_server_that_fails_is_killed_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events: list[tuple[str, Any]] = []
    with FakeServer(events, answers_release=False) as failing, FakeServer(events) as good:
        around = Surroundings([failing, good], events)

        async def cycle() -> None:
            servers = colocated(around)
            await servers.release()
            assert good.held == set()
            await servers.pause()
            await servers.resume()

        asyncio.run(cycle())
        assert around.lost == [failing]
        assert [name for name, _ in events].count("kill") == 1
        assert not failing.is_started
        assert good.held == {"kv_cache", "weights"}
        assert f"{failing.address}/release_memory_occupation: no answer" in caplog.text


@pytest.mark.sglang
def test_a_real_server_generates_again_after_it_released_its_memory(server: SglangServer) -> None:
    """Without CUDA it keeps its memory; calls, their order and its state are the same."""
    around = Surroundings([server], [])  # type: ignore[list-item]

    async def sample(http: httpx.AsyncClient, num_tokens: int) -> dict[str, Any]:
        body = {
            "input_ids": [5, 6, 7],
            "sampling_params": {"max_new_tokens": num_tokens, "ignore_eos": True},
        }
        reply = await http.post("/generate", json=body, headers=server.keys.headers(admin=False))
        answer: dict[str, Any] = reply.json()
        return answer

    async def use() -> None:
        any_around: Any = around
        servers = ColocatedServers(any_around, any_around, around, timeout_s=120.0)
        async with httpx.AsyncClient(
            base_url=server.address, trust_env=False, timeout=120.0
        ) as http:
            running = asyncio.create_task(sample(http, 200))
            await asyncio.sleep(0.2)  # it need not run yet; if it does, it is aborted
            await servers.release()
            answer = await running
            assert answer["meta_info"]["finish_reason"]["type"] in ("abort", "length")
            assert (await http.get("/ready")).status_code == 503
            held_back = asyncio.create_task(sample(http, 4))
            await servers.pause()
            await asyncio.sleep(1)
            assert not held_back.done()
            await servers.resume()
            answer = await held_back
            assert answer["meta_info"]["finish_reason"]["type"] == "length"
            assert len(answer["output_ids"]) == 4
            assert (await http.get("/ready")).status_code == 200

    asyncio.run(use())
    assert around.lost == []
    assert server.exit_reason() is None
