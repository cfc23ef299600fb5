"""A weight service on fake servers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.engine.base import BucketLayout, GroupPlace
from bapo_megatron.engine.sglang.client import SglangClient
from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.weight_sync.messages import (
    Opened,
    Receive,
)
from bapo_megatron.weight_sync.receive import WeightReceiver
from tests.fakes.fake_weight_server import LOGPROB, FakeWeightServer
from tests.weight_sync.ranks import StubGeneration, StubPool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


BUCKET = BucketLayout(names=("w",), dtypes=("float32",), shapes=((2, 3),))
PROBE = ((3, 1, 4), (1, 5))
EXPECTED = ((LOGPROB, LOGPROB), (LOGPROB,))


class Setting:
    """A service with what it uses."""

    def __init__(self, pool: StubPool, generation: StubGeneration, service: WeightReceiver) -> None:
        self.pool = pool
        self.generation = generation
        self.service = service

    async def receive_all(self, version: int, *, join: bool = True) -> Opened:
        """A whole sync of two buckets; returns what ``begin`` said."""
        opened = await self.service.begin(version)
        if join:
            assert await self.join(1 + sum(opened.num_ranks)) is None
        for is_last in (False, True):
            assert await self.service.receive(Receive(bucket=BUCKET, is_last=is_last)) is None
        assert await self.service.finish(None) is None
        await self.service.resume(None)
        return opened

    async def join(self, world_size: int = 3) -> str | None:
        place = GroupPlace("group", "127.0.0.1", 1234, "gloo", 0, world_size)
        return await self.service.join(place)

    def states(self) -> list[str]:
        return [engine.state.value for engine in self.pool.engines]


@contextlib.asynccontextmanager
async def open_setting(
    servers: list[FakeWeightServer], rollout: dict[str, Any], keys: ApiKeys
) -> AsyncIterator[Setting]:
    sync = {"verify": "every", **rollout.pop("weight_sync", {})}
    health = {"timeout_s": 5, "patience_s": 20}
    config = RolloutConfig.model_validate({"health": health, **rollout, "weight_sync": sync})
    clients = [SglangClient(server.address, keys, request_timeout_s=60) for server in servers]
    pool, generation = StubPool(clients), StubGeneration()
    service = WeightReceiver(pool, config, generation, PROBE)
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
