"""An engine on a small random model, and requests to it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bapo_megatron.config.megatron import LoraConfig, ModelConfig
from bapo_megatron.config.rollout import LocalConfig
from bapo_megatron.data.record import Completion
from bapo_megatron.engine.base import GenerateRequest, SamplingSettings
from bapo_megatron.engine.local.engine import LocalBackend, LocalEngine
from tests.engine.helpers import Kept, reference_logprobs

EOS = 1
SETTINGS = SamplingSettings(temperature=0.8, max_new_tokens=40, seed=5)


@contextlib.asynccontextmanager
async def opened(
    model_dir: Path,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    lora: LoraConfig | None = None,
    **options: Any,
) -> AsyncIterator[LocalEngine]:
    model = ModelConfig(path=model_dir, dtype=dtype, lora=lora or LoraConfig())
    engine = await LocalBackend(model, LocalConfig(**options), "cpu").connect("local")
    try:
        yield engine
    finally:
        await engine.close()


def request(input_ids: Sequence[int], settings: SamplingSettings, **fields: Any) -> GenerateRequest:
    values = {"input_ids": input_ids, "sampling": settings, "label": "sample 3", "version": 0}
    return GenerateRequest(**{**values, **fields})


class Stream:
    """A request in flight, and what it has got."""

    def __init__(self, engine: LocalEngine, request: GenerateRequest) -> None:
        self.sink = Kept()
        self.request = request
        self.task = asyncio.create_task(engine.stream(request, self.sink))

    @property
    def completion(self) -> Completion:
        return self.sink.completion()

    @property
    def tokens(self) -> list[int]:
        return self.completion.token_ids.tolist()


async def start(engine: LocalEngine, *requests: GenerateRequest) -> list[Stream]:
    streams = [Stream(engine, request) for request in requests]
    await asyncio.sleep(0)
    return streams


async def finish(engine: LocalEngine, streams: Sequence[Stream], burst: int = 8) -> None:
    while not all(stream.task.done() for stream in streams):
        await engine.decode(burst)
    for stream in streams:
        await stream.task


async def complete(
    engine: LocalEngine, *requests: GenerateRequest, burst: int = 8
) -> list[Completion]:
    streams = await start(engine, *requests)
    await finish(engine, streams, burst)
    return [stream.completion for stream in streams]


async def sampled(
    model_dir: Path, requests: Sequence[GenerateRequest], burst: int = 8, max_rows: int = 256
) -> list[Completion]:
    """What an engine of its own samples for requests."""
    async with opened(model_dir, max_rows=max_rows) as engine:
        return await complete(engine, *requests, burst=burst)


def assert_reference(
    model_dir: Path, requests: Sequence[GenerateRequest], completions: Sequence[Completion]
) -> None:
    for request, completion in zip(requests, completions, strict=True):
        expected = reference_logprobs(
            model_dir, request.input_ids, completion.token_ids, request.sampling.temperature
        )
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)


def ragged_requests(
    number: int, *, max_new_tokens: int = 40, longest: int = 60, **fields: Any
) -> list[GenerateRequest]:
    """Requests with inputs of one token and more, and a seed each."""
    draw = np.random.default_rng(7)
    return [
        request(
            draw.integers(3, 90, size=1 + int(draw.integers(longest)) * (n % 5 > 0)).tolist(),
            SamplingSettings(0.8, max_new_tokens, seed=n),
            label=f"sample {n}",
            **fields,
        )
        for n in range(number)
    ]
