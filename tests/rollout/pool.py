"""A pool of fake servers, and responses that it samples."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.data.record import Completion, join
from bapo_megatron.data.staleness import num_spanned
from bapo_megatron.engine.base import GenerateRequest, SamplingSettings
from bapo_megatron.engine.pooled import PooledEngine
from bapo_megatron.engine.sglang.client import SglangClient
from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.types import FinishReason
from tests.fakes.fake_sglang import FakeSglang, logprob_of, token_at

T = 0.5
PROMPT = [1, 2, 3]
AFFINITIES = itertools.count(1000)
"""Affinities for requests that need not share a server."""
LIMIT_S = 60
"""No test comes near it on a machine that works."""


@contextlib.asynccontextmanager
async def pool_of(
    *servers: FakeSglang | str,
    version: int | None = 0,
    health: dict[str, float] | None = None,
    **rollout: Any,
) -> AsyncIterator[EnginePool]:
    config = RolloutConfig.model_validate(
        {
            "stream_tokens": 4,
            "health": {"interval_s": 0.1, "timeout_s": 2.0, "patience_s": 30.0, **(health or {})},
            **rollout,
        }
    )
    addresses = [server if isinstance(server, str) else server.address for server in servers]
    pool = EnginePool(clients_of(addresses, config), config, version)
    try:
        async with asyncio.timeout(LIMIT_S):
            yield pool
    finally:
        await pool.states.close()


@contextlib.asynccontextmanager
async def pool_on(*servers: FakeSglang, **options: Any) -> AsyncIterator[EnginePool]:
    """The pool of these servers, which run meanwhile and have answered."""
    with contextlib.ExitStack() as running:
        for server in servers:
            running.enter_context(server)
        async with pool_of(*servers, **options) as pool:
            await pool.states.wait_for_engines()
            yield pool


def clients_of(
    addresses: Sequence[str], config: RolloutConfig, keys: ApiKeys | None = None
) -> list[SglangClient]:
    return [
        SglangClient(address, keys or ApiKeys(), request_timeout_s=config.request_timeout_s)
        for address in addresses
    ]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


class Response:
    """One request; its pieces as they come."""

    def __init__(
        self,
        pool: EnginePool,
        max_tokens: int = 20,
        prompt: list[int] | None = None,
        *,
        affinity: int | None = None,
    ) -> None:
        self.prompt = prompt or PROMPT
        self.parts: list[Completion] = []
        self._whole = GenerateRequest(
            input_ids=self.prompt,
            label="sample 1",
            sampling=SamplingSettings(T, max_tokens, seed=0),
        )
        affinity = next(AFFINITIES) if affinity is None else affinity
        self.task = asyncio.create_task(pool.generate(self._plan, self.parts.append, affinity))

    def _plan(self) -> GenerateRequest | None:
        whole, token_ids = self._whole, self.token_ids
        if len(token_ids) == whole.sampling.max_new_tokens:
            return None
        remaining = whole.sampling.max_new_tokens - len(token_ids)
        return replace(
            whole,
            input_ids=[*self.prompt, *token_ids],
            sampling=replace(whole.sampling, max_new_tokens=remaining),
            sampled_tokens=whole.sampled_tokens + len(token_ids),
        )

    @property
    def token_ids(self) -> list[int]:
        return [token_id for part in self.parts for token_id in part.token_ids.tolist()]

    async def check(self, length: int, finish: FinishReason) -> Completion:
        """Wait for the end: every token came once, in order, with its log-prob."""
        assert await self.task
        completion, start = join(self.parts, self.parts[-1].finish_reason), len(self.prompt)
        assert self.token_ids == [token_at(start + index) for index in range(length)]
        expected = [logprob_of(token_id, T) for token_id in self.token_ids]
        np.testing.assert_allclose(completion.logprobs, expected, rtol=1e-6)
        assert num_spanned(completion.versions) == length
        assert completion.finish_reason is finish
        assert all(part.finish_reason is FinishReason.ABORT for part in self.parts[:-1])
        assert self.parts[-1].finish_reason is finish
        return completion


def states_of(pool: EnginePool) -> list[str]:
    return [str(engine.state) for engine in pool.states.engines]


def engine_of(pool: EnginePool, fake: FakeSglang) -> PooledEngine:
    return next(engine for engine in pool.states.engines if engine.address == fake.address)
