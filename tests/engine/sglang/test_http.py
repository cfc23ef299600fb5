"""Connections for many requests at a time: tests of ``bapo_megatron.engine.sglang.http``."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import httpcore
import httpx
import pytest

from bapo_megatron.engine.sglang.http import SeparateConnections
from tests.fakes.wave_server import WaveServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


def play(scene: Callable[[WaveServer, httpx.AsyncClient], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(60), opened(**options) as (server, client):
            await scene(server, client)

    asyncio.run(run())


@contextlib.asynccontextmanager
async def opened(
    keepalive_expiry_s: float = 60.0,
) -> AsyncIterator[tuple[WaveServer, httpx.AsyncClient]]:
    server = WaveServer()
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, backlog=1024)
    port = listener.sockets[0].getsockname()[1]
    client = httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}",
        transport=SeparateConnections(keepalive_expiry_s),
        timeout=30,
    )
    async with client:
        yield server, client
    listener.close()


async def send(client: httpx.AsyncClient, count: int) -> None:
    replies = await asyncio.gather(*(client.get("/") for _ in range(count)))
    assert [reply.text for reply in replies] == ["ok"] * count


def test_requests_in_flight_have_a_connection_each_and_later_ones_reuse_them() -> None:
    async def scene(server: WaveServer, client: httpx.AsyncClient) -> None:
        for server.wave in (50, 50, 7):
            await send(client, server.wave)
        assert server.num_connections == 50

    play(scene)


@pytest.mark.parametrize("count", [20, 200])
def test_the_cost_of_a_request_does_not_grow_with_their_number(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    num_looks = 0
    is_idle = httpcore.AsyncHTTPConnection.is_idle

    def look(connection: httpcore.AsyncHTTPConnection) -> bool:
        nonlocal num_looks
        num_looks += 1
        return is_idle(connection)

    monkeypatch.setattr(httpcore.AsyncHTTPConnection, "is_idle", look)

    async def scene(server: WaveServer, client: httpx.AsyncClient) -> None:
        for server.wave in (count, count):
            await send(client, count)
        assert 0 < num_looks <= 20 * count  # the pool of httpx: over count²

    play(scene)


def test_a_connection_that_was_idle_for_too_long_is_not_used_again() -> None:
    async def scene(server: WaveServer, client: httpx.AsyncClient) -> None:
        await send(client, 1)
        await asyncio.sleep(0.05)
        await send(client, 1)
        assert server.num_connections == 2

    play(scene, keepalive_expiry_s=0.01)


def test_connections_that_were_idle_for_too_long_are_closed() -> None:
    async def scene(server: WaveServer, client: httpx.AsyncClient) -> None:
        server.wave = 30
        await send(client, 30)
        await asyncio.sleep(0.3)
        server.wave = 2
        await send(client, 2)
        while server.num_open > 2:  # the ends arrive
            await asyncio.sleep(0.01)

    play(scene, keepalive_expiry_s=0.2)


def test_after_a_broken_or_cancelled_request_others_go_on() -> None:
    async def scene(server: WaveServer, client: httpx.AsyncClient) -> None:
        await send(client, 1)
        server.breaks = True
        with pytest.raises(httpx.TransportError):
            await client.get("/")
        server.breaks, server.wave = False, 2
        task = asyncio.create_task(client.get("/"))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        server.wave = 3  # the cancelled one has come, too
        await send(client, 2)

    play(scene)


def test_closing_ends_what_is_in_flight() -> None:
    async def scene(server: WaveServer, client: httpx.AsyncClient) -> None:
        server.wave = 2
        task = asyncio.create_task(client.get("/"))
        await asyncio.sleep(0.05)
        await client.aclose()
        with pytest.raises((httpx.TransportError, RuntimeError)):
            await task

    play(scene)
