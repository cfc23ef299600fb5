"""A server's memory: the calls that release it and take it again, and that none is repeated."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

import pytest

from bapo_megatron.engine.base import MemoryPart
from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.errors import RolloutError, ServerError, ServerGoneError
from tests.engine.sglang.servers import with_client

if TYPE_CHECKING:
    from bapo_megatron.engine.sglang.client import SglangClient

KEYS = ApiKeys("api", "admin")
RELEASE = [
    ("/pause_generation", {"mode": "abort"}),
    ("/flush_cache?timeout=0.5", {}),
    ("/release_memory_occupation", {"tags": ["kv_cache", "cuda_graph", "weights"]}),
]
TAKE_WEIGHTS = [("/resume_memory_occupation", {"tags": ["weights"]})]
TAKE_CACHE = [
    ("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}),
    ("/continue_generation", {}),
]


@dataclass
class FakeMemory:
    """The control calls of a server; it dies of what SGLang dies of. Start it with ``with``."""

    is_busy: bool = False
    """A request is being worked on, whatever is aborted."""
    refused: str = ""
    """Path that is answered with HTTP 400."""
    held: set[str] = field(default_factory=lambda: {"kv_cache", "cuda_graph", "weights"})
    is_paused: bool = False
    is_crashed: bool = False
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __enter__(self) -> Self:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.headers["Authorization"] == "Bearer admin"
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.calls.append((self.path, body))
                status = 400 if self.path == fake.refused else fake.answer(self.path, body)
                if status is None:
                    fake.is_crashed = True
                    return
                self.send_response(status)
                self.end_headers()
                self.wfile.write(b"Timed out waiting for idle state." if status == 400 else b"null")

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
        if path == "/pause_generation":
            self.is_paused = body == {"mode": "abort"}
        elif path.startswith("/flush_cache"):
            return 400 if self.is_busy else 200
        elif path == "/release_memory_occupation":
            if self.is_busy or not self.is_paused:
                return None
            self.held -= set(body["tags"])
        elif path == "/resume_memory_occupation":
            if self.held & set(body["tags"]):
                return None
            self.held |= set(body["tags"])
        elif path == "/continue_generation":
            assert self.held == {"kv_cache", "cuda_graph", "weights"}
            self.is_paused = False
        return 200


def test_memory_is_released_by_an_idle_server_and_taken_again_part_by_part() -> None:
    async def use(client: SglangClient) -> None:
        for _ in range(2):
            await client.release_memory(1.0)
            assert (fake.held, fake.is_paused) == (set(), True)
            await client.take_memory(MemoryPart.WEIGHTS, 1.0)
            assert (fake.held, fake.is_paused) == ({"weights"}, True)
            await client.take_memory(MemoryPart.CACHE, 1.0)
            assert (fake.held, fake.is_paused) == ({"kv_cache", "cuda_graph", "weights"}, False)

    with FakeMemory() as fake:
        with_client(fake.address, use, KEYS)
        assert fake.calls == [*RELEASE, *TAKE_WEIGHTS, *TAKE_CACHE] * 2


def test_a_busy_server_is_not_told_to_release_what_would_crash_it() -> None:
    async def use(client: SglangClient) -> None:
        with pytest.raises(RolloutError) as caught:
            await client.release_memory(1.0)
        assert not isinstance(caught.value, ServerError)
        assert str(caught.value) == (
            f"{fake.address}: is still busy 0.5 s after its requests were aborted; its memory is "
            "not released, which would crash it. See the server's log, and continue with "
            "resume=true"
        )

    with FakeMemory(is_busy=True) as fake:
        with_client(fake.address, use, KEYS)
        assert fake.calls == RELEASE[:2]


def test_a_call_that_breaks_is_not_repeated() -> None:
    async def use(client: SglangClient) -> None:
        with pytest.raises(ServerGoneError, match="/resume_memory_occupation: no connection"):
            await client.take_memory(MemoryPart.WEIGHTS, 1.0)

    with FakeMemory() as fake:
        with_client(fake.address, use, KEYS)
        assert fake.is_crashed
        assert fake.calls == TAKE_WEIGHTS


@pytest.mark.parametrize("path", ["/pause_generation", "/release_memory_occupation"])
def test_a_refusal_leaves_a_server_of_which_nobody_knows_what_it_holds(path: str) -> None:
    async def use(client: SglangClient) -> None:
        with pytest.raises(ServerError, match=f"{path}: HTTP 400"):
            await client.release_memory(1.0)

    with FakeMemory(refused=path) as fake:
        with_client(fake.address, use, KEYS)
