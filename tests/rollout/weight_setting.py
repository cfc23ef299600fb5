"""A weight service on fake servers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.rollout.sglang_client import ApiKeys, SglangClient
from bapo_megatron.rollout.weight_service import WeightService
from tests.fakes.fake_weight_server import LOGPROB, FakeWeightServer
from tests.rollout.weight_ranks import StubGeneration, StubPool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

BUCKET: dict[str, Any] = {"names": ["w"], "dtypes": ["float32"], "shapes": [[2, 3]]}
PROBE = ((3, 1, 4), (1, 5))
EXPECTED = [[LOGPROB, LOGPROB], [LOGPROB]]


class Setting:
    """A service with what it uses."""

    def __init__(self, pool: StubPool, generation: StubGeneration, service: WeightService) -> None:
        self.pool = pool
        self.generation = generation
        self.service = service

    async def receive_all(self, version: int, *, join: bool = True) -> dict[str, Any]:
        """A whole sync of two buckets; returns what ``begin`` said."""
        opened = await self.service.begin(version)
        if join:
            assert await self.join() == {"failed": None}
        for is_last in (False, True):
            assert await self.service.receive(**BUCKET, is_last=is_last) == {"failed": None}
        assert await self.service.finish() == {"failed": None}
        await self.service.resume()
        return opened

    async def join(self) -> dict[str, Any]:
        return await self.service.join("group", "127.0.0.1", 1234, "gloo")

    def states(self) -> list[str]:
        return [engine.state.value for engine in self.pool.engines]


@contextlib.asynccontextmanager
async def open_setting(
    servers: list[FakeWeightServer], rollout: dict[str, Any], keys: ApiKeys
) -> AsyncIterator[Setting]:
    config = RolloutConfig.model_validate({"health": {"timeout_s": 5, "patience_s": 20}, **rollout})
    clients = [SglangClient(server.address, keys, request_timeout_s=60) for server in servers]
    pool, generation = StubPool(clients), StubGeneration()
    service = WeightService(pool, config, generation, PROBE)
    try:
        yield Setting(pool, generation, service)
    finally:
        await service.close()
        for client in clients:
            await client.close()


def run_sync(
    servers: list[FakeWeightServer],
    use: Callable[[Setting], Awaitable[None]],
    keys: ApiKeys | None = None,
    **rollout: Any,
) -> None:
    async def run() -> None:
        async with open_setting(servers, rollout, keys or ApiKeys()) as setting:
            await use(setting)

    asyncio.run(run())
