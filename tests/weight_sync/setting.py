"""A ``WeightReceiver`` on fake servers, and what it uses."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.engine.base import BucketLayout, GroupPlace
from bapo_megatron.engine.pooled import EngineState, PooledEngine
from bapo_megatron.engine.sglang.client import SglangClient
from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.weight_sync.receive import Load, Opened, Receive, Resumed, WeightReceiver
from tests.fakes.fake_weight_server import LOGPROB

BUCKET = BucketLayout(names=("w",), dtypes=("float32",), shapes=((2, 3),))
PROBE = ((3, 1, 4), (1, 5))
EXPECTED = ((LOGPROB, LOGPROB), (LOGPROB,))


class StubPool:
    """``EngineStates`` whose servers change their states by its calls alone."""

    def __init__(self, clients: Sequence[SglangClient]) -> None:
        self.engines = [PooledEngine(client, EngineState.STALE) for client in clients]
        self.version: int | None = None
        self.reasons: dict[str, str] = {}

    def mark_lost(self, pooled: PooledEngine, reason: str) -> None:
        pooled.state, pooled.is_unproven = EngineState.LOST, True
        self.reasons[pooled.address] = reason

    def mark_updated(self, pooled: PooledEngine, version: int) -> None:
        assert version == self.version
        pooled.state = EngineState.USABLE

    def describe(self) -> str:
        return "; ".join(self.reasons.values())


class StubGeneration:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_running = True

    async def pause(self) -> bool:
        self.calls.append("pause")
        return self.is_running

    async def resume(self) -> None:
        self.calls.append("resume")


class Setting:
    def __init__(self, pool: StubPool, generation: StubGeneration, receiver: WeightReceiver):
        self.pool, self.generation, self.receiver = pool, generation, receiver

    async def begin(self, version: int = 7) -> Opened:
        """Begin an attempt, and form a group unless the servers share one."""
        opened = await self.receiver.begin(version)
        if not opened.share_group:
            place = GroupPlace("group", "127.0.0.1", 1234, "gloo", 0, 1 + sum(opened.num_ranks))
            assert await self.receiver.join(place) is None
        return opened

    async def receive(self, *, is_last: bool = False) -> str | None:
        return await self.receiver.receive(Receive(bucket=BUCKET, is_last=is_last))

    async def broadcast(self, version: int = 7) -> Opened:
        """A whole weight sync of two buckets; returns what ``begin`` said."""
        opened = await self.begin(version)
        for is_last in (False, True):
            assert await self.receive(is_last=is_last) is None
        await self.receiver.resume(())
        return opened

    async def load(self, version: int = 7) -> None:
        await self.receiver.load(Load(model_dir=Path("/weights"), version=version))

    async def compare(
        self, expected: tuple[tuple[float, ...], ...] = EXPECTED, version: int = 7
    ) -> Resumed:
        """A whole weight sync by disk, with the probe."""
        await self.load(version)
        probe = await self.receiver.probe(None)
        return await self.receiver.resume(expected if probe else ())

    @property
    def states(self) -> list[str]:
        return [entry.state.value for entry in self.pool.engines]

    def reason(self, number: int) -> str:
        return self.pool.reasons[self.pool.engines[number].address]


@contextlib.asynccontextmanager
async def sync_on(servers: Sequence[Any], **rollout: Any) -> AsyncIterator[Setting]:
    """A receiver on these servers, with this section of the configuration."""
    sync = {"verify": "every", **rollout.pop("weight_sync", {})}
    health = {"timeout_s": 5, "patience_s": 20}
    config = RolloutConfig.model_validate({"health": health, **rollout, "weight_sync": sync})
    keeps_cache = config.weight_sync.in_flight == "in_place"
    clients = [
        SglangClient(s.address, ApiKeys(), request_timeout_s=60, keeps_cache=keeps_cache)
        for s in servers
    ]
    pool, generation = StubPool(clients), StubGeneration()
    receiver = WeightReceiver(pool, config, generation, PROBE)
    try:
        yield Setting(pool, generation, receiver)
    finally:
        await receiver.close()
        for client in clients:
            await client.close()
