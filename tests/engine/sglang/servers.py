"""Real SGLang servers, and clients of real and fake ones."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from bapo_megatron.config.megatron import LoraConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.data.record import Completion
from bapo_megatron.engine.base import GenerateRequest, Readiness, SamplingSettings
from bapo_megatron.engine.sglang.client import SglangClient
from bapo_megatron.engine.sglang.keys import ADMIN_API_KEY_VARIABLE, API_KEY_VARIABLE, ApiKeys
from bapo_megatron.engine.sglang.server import SglangServer
from bapo_megatron.runtime.processes import tail
from tests.engine.helpers import Kept

KEYS = ApiKeys(api_key="a" * 32, admin_api_key="b" * 32)
SERVER = {"max_total_tokens": 8192, "mem_fraction": 0.3}


def server_config(
    model_dir: Path,
    run_dir: Path,
    seed: int = 0,
    dtype: str = "float32",
    lora: LoraConfig | None = None,
    **rollout: Any,
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "test",
            "run_dir": run_dir,
            "seed": seed,
            "model": {"path": model_dir, "dtype": dtype, "lora": lora or {}},
            "rollout": rollout,
        }
    )


def make_server(model_dir: Path, run_dir: Path, *, awaits_weights: bool = False) -> SglangServer:
    config = server_config(model_dir, run_dir, server=SERVER)
    return SglangServer(config, "cpu", KEYS, awaits_weights=awaits_weights)


@contextlib.asynccontextmanager
async def connected(
    address: str, keys: ApiKeys | None = None, **options: Any
) -> AsyncIterator[SglangClient]:
    client = SglangClient(address, keys or ApiKeys(), request_timeout_s=60.0, **options)
    try:
        yield client
    finally:
        await client.close()


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
        while asyncio.run(server.ask(5.0)) is not Readiness.READY:
            assert server.exit_reason() is None, tail(server.log_path)
            time.sleep(0.2)
        yield server
    finally:
        server.close()


def environment_of(keys: ApiKeys) -> dict[str, str]:
    """The environment of a run that may use servers with these keys."""
    return {API_KEY_VARIABLE: keys.api_key, ADMIN_API_KEY_VARIABLE: keys.admin_api_key}


@contextlib.contextmanager
def lent(server: SglangServer, model_dir: Path) -> Iterator[dict[str, str]]:
    """The environment of a run that may use a server; it gets the weights of its model back."""
    yield environment_of(server.keys)
    asyncio.run(restore_weights(server, model_dir))


async def adapter_versions(server: SglangServer) -> list[str]:
    """The versions of the adapters that a server holds; asserts that their names say them."""
    async with connected(server.address, server.keys) as client:
        models = await client.ask("/v1/models", itemgetter("data"))
    names = [model["id"].split("_")[:2] for model in models[1:]]
    assert {kind for kind, _ in names} <= {"version"}
    return [version for _, version in names]


async def restore_weights(server: SglangServer, model_dir: Path) -> None:
    async with connected(server.address, server.keys) as client:
        await client.weights.load(model_dir, version=0, timeout_s=60)
