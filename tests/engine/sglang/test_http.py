"""Connections for many requests at a time: tests of ``bapo_megatron.engine.sglang.http``."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import aiohttp
import pytest

from bapo_megatron.engine.sglang import http as sglang_http
from bapo_megatron.engine.sglang.http import SglangHttp
from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.errors import BrokenConnectionError, ServerError
from tests.engine.sglang.servers import with_http
from tests.fakes.fake_sglang import FakeSglang
from tests.fakes.wave_server import WaveServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path
    from types import FrameType


def play(scene: Callable[[WaveServer, SglangHttp], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(60), opened() as (server, http):
            await scene(server, http)

    asyncio.run(run())


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[tuple[WaveServer, SglangHttp]]:
    server = WaveServer()
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, backlog=1024)
    port = listener.sockets[0].getsockname()[1]
    http = SglangHttp(f"http://127.0.0.1:{port}", ApiKeys(), 60.0)
    try:
        yield server, http
    finally:
        await http.close()
        listener.close()


async def generate(http: SglangHttp) -> bytes:
    async with http.stream({}, "a request") as chunks:
        return b"".join([chunk async for chunk in chunks])


async def send(http: SglangHttp, count: int) -> None:
    assert await asyncio.gather(*(generate(http) for _ in range(count))) == [b"ok"] * count


def test_requests_in_flight_have_a_connection_each_and_later_ones_reuse_them() -> None:
    async def scene(server: WaveServer, http: SglangHttp) -> None:
        for server.wave in (50, 50, 7):
            await send(http, server.wave)
        assert server.num_connections == 50

    play(scene)


def test_the_cost_of_a_request_does_not_grow_with_their_number() -> None:
    num_calls: list[int] = []

    def count(frame: FrameType, event: str, argument: object) -> None:
        num_calls[-1] += event == "call"

    async def scene(server: WaveServer, http: SglangHttp) -> None:
        for count_of_wave in (100, 10, 100):  # the first one opens the connections
            server.wave = count_of_wave
            num_calls.append(0)
            sys.setprofile(count)
            try:
                await send(http, count_of_wave)
            finally:
                sys.setprofile(None)

    play(scene)
    _, few, many = num_calls
    assert many / 100 < 2 * few / 10  # looking at all connections for each: 10 times


def test_a_connection_that_was_idle_for_too_long_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sglang_http, "_KEEPALIVE_EXPIRY_S", 0.01)

    async def scene(server: WaveServer, http: SglangHttp) -> None:
        await send(http, 1)
        await asyncio.sleep(0.05)
        await send(http, 1)
        assert server.num_connections == 2

    play(scene)


def test_after_a_broken_or_cancelled_request_others_go_on() -> None:
    async def scene(server: WaveServer, http: SglangHttp) -> None:
        await send(http, 1)
        server.breaks = True
        with pytest.raises(aiohttp.ClientError):
            await generate(http)
        server.breaks, server.wave = False, 2
        task = asyncio.create_task(generate(http))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        server.wave = 3  # the cancelled one has come, too
        await send(http, 2)

    play(scene)


def test_closing_ends_what_is_in_flight() -> None:
    async def scene(server: WaveServer, http: SglangHttp) -> None:
        server.wave = 2
        task = asyncio.create_task(generate(http))
        await asyncio.sleep(0.05)
        await http.close()
        with pytest.raises((aiohttp.ClientError, RuntimeError)):
            await task

    play(scene)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_https_servers_are_checked_against_the_authorities_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = tmp_path / "server.pem"
    subprocess.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=server "
        "-addext subjectAltName=IP:127.0.0.1 -keyout server.pem -out public.pem",
        shell=True,
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    with certificate.open("a") as file:
        file.write((tmp_path / "public.pem").read_text())

    async def ask(http: SglangHttp) -> str:
        return str((await http.call("/model_info", admin=False)).json()["weight_version"])

    with FakeSglang(certificate=certificate) as fake:
        with pytest.raises(BrokenConnectionError, match="certificate verify failed"):
            with_http(fake.address, ask)
        # What OpenSSL, and with it every program of the system, takes for its authorities.
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "public.pem"))
        assert with_http(fake.address, ask) == "0"


async def _endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server whose answers never end; the path is their status."""
    with contextlib.suppress(ConnectionError):
        status = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1].strip(b"/")
        status = b"200" if status == b"generate" else status
        writer.write(b"HTTP/1.1 " + status + b" OK\r\nConnection: close\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()


@contextlib.asynccontextmanager
async def _to_endless_server() -> AsyncIterator[SglangHttp]:
    listener = await asyncio.start_server(_endless, "127.0.0.1", 0)
    http = SglangHttp(
        f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", ApiKeys(), request_timeout_s=60
    )
    try:
        async with asyncio.timeout(20):
            yield http
    finally:
        await http.close()
        listener.close()


@pytest.mark.parametrize("status", [200, 500])
def test_an_answer_without_end_is_refused(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_http, "_MAX_REPLY_BYTES", 2 << 20)

    async def run() -> None:
        async with _to_endless_server() as http:
            with pytest.raises(ServerError, match=f"/{status}: an answer of more than 2 MB"):
                await http.call(f"/{status}", admin=True)

    asyncio.run(run())


def test_what_follows_the_last_event_without_end_is_not_waited_for() -> None:
    async def run() -> None:
        async with _to_endless_server() as http, http.stream({}, "a request") as chunks:
            async for _ in chunks:
                break

    asyncio.run(run())
