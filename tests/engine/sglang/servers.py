"""Real SGLang servers, and clients of real and fake ones."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bapo_megatron.config.megatron import ModelConfig
from bapo_megatron.config.rollout import ServerConfig
from bapo_megatron.engine.base import GenerateRequest, Readiness
from bapo_megatron.engine.sglang.client import SglangClient
from bapo_megatron.engine.sglang.http import SglangHttp
from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.engine.sglang.server import SglangServer
from bapo_megatron.runtime.processes import tail
from tests.engine.helpers import Kept

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from bapo_megatron.engine.base import Completion, SamplingSettings

KEYS = ApiKeys(api_key="a" * 32, admin_api_key="b" * 32)
SERVER = {"max_total_tokens": 8192, "mem_fraction": 0.3}


class CumulativeServer(SglangServer):
    """Each event has all tokens."""

    def arguments(self) -> list[str]:
        """Arguments of ``sglang.launch_server``."""
        return [a for a in super().arguments() if a != "--incremental-streaming-output"]


def make_server(
    model_dir: Path,
    run_dir: Path,
    server_class: type[SglangServer] = SglangServer,
    *,
    awaits_weights: bool = False,
) -> SglangServer:
    """Prepare a real server."""
    return server_class(
        ModelConfig(path=model_dir, dtype="float32"),
        ServerConfig.model_validate(SERVER),
        run_dir=run_dir,
        seed=0,
        device="cpu",
        keys=KEYS,
        awaits_weights=awaits_weights,
    )


def with_client[T](
    address: str,
    use: Callable[[SglangClient], Awaitable[T]],
    keys: ApiKeys | None = None,
) -> T:
    """Run ``use`` with a client in an event loop of its own."""

    async def run() -> T:
        client = SglangClient(address, keys or ApiKeys(), request_timeout_s=60.0)
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(run())


def with_http[T](
    address: str,
    use: Callable[[SglangHttp], Awaitable[T]],
    keys: ApiKeys | None = None,
) -> T:
    """Run ``use`` with what calls a server in an event loop of its own."""

    async def run() -> T:
        http = SglangHttp(address, keys or ApiKeys(), 60.0)
        try:
            return await use(http)
        finally:
            await http.close()

    return asyncio.run(run())


async def sample(
    client: SglangClient, input_ids: Sequence[int], sampling: SamplingSettings, label: str = ""
) -> Completion:
    """One completion, whichever weights version the server holds."""
    sink = Kept()
    await client.stream(GenerateRequest(input_ids=input_ids, sampling=sampling, label=label), sink)
    return sink.completion()


@contextlib.contextmanager
def running(server: SglangServer) -> Iterator[SglangServer]:
    """Start a server and wait until it takes requests; it ends with the block."""
    server.start()
    try:
        wait_until_ready(server)
        yield server
    finally:
        server.close()


def wait_until_ready(server: SglangServer) -> None:
    """Wait until a server that was started takes requests."""
    while True:
        assert server.exit_reason() is None, tail(server.log_path)
        if asyncio.run(server.ask(5.0)) is Readiness.READY:
            return
        time.sleep(0.2)


async def load_weights(client: SglangClient, model_dir: Path, version: int) -> None:
    """Have one server load a Hugging Face directory."""
    control = await client.weights(60)
    await control.load(model_dir, version=version, timeout_s=60)
