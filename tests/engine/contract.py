"""What the contract of ``Engine`` is tested with: an engine of each kind, and requests to it.

R = tokens of one completion.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.config.megatron import ModelConfig
from bapo_megatron.config.rollout import LocalConfig
from bapo_megatron.data.record import Completion
from bapo_megatron.engine.base import Engine, GenerateRequest, SamplingSettings, Stepper
from bapo_megatron.engine.local.engine import LocalBackend
from bapo_megatron.engine.sglang.client import SglangClient
from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.engine.sglang.server import SglangServer
from tests.engine.helpers import Kept, exact_distribution, reference_logprobs
from tests.fakes.fake_sglang import FakeSglang, V, logprob_of, token_at

PROMPT = [3, 20, 77, 4]
LONG = 240
"""Tokens, nearly as many as the model can hold: there is time to interrupt such a response."""
_FAKE_STOP = 200


@dataclass(frozen=True, kw_only=True)
class Case:
    """How an engine is opened, and what is known of it."""

    connect: Callable[..., Awaitable[Engine]]
    """Makes an engine for the event loop in which it is called; may take options of its kind."""
    expected: Callable[[Sequence[int], Sequence[int] | np.ndarray, float], np.ndarray]
    """[R] log-probs of a response to a prompt, at a temperature."""
    distribution: Callable[[Sequence[int], np.ndarray, float], np.ndarray]
    """[R, V] float64 log-probs of all tokens there."""
    eos_token_id: int
    pause_modes: tuple[str, ...] = ("retract", "in_place")
    """How it can be paused."""
    has_model: bool = True
    """It computes with the model's weights; else tokens and log-probs are made up, and nothing can
    be said of scores, of the model's limits, or of what new weights change."""


@contextlib.contextmanager
def fake_case(model_dir: Path) -> Iterator[Case]:
    def expected(
        prompt: Sequence[int], response: Sequence[int] | np.ndarray, temperature: float
    ) -> np.ndarray:
        return np.array([logprob_of(int(token_id), temperature) for token_id in response])

    def distribution(_: Sequence[int], response: np.ndarray, temperature: float) -> np.ndarray:
        values_V = [logprob_of(token_id, temperature) for token_id in range(V)]
        return np.tile(values_V, (len(response), 1))

    with FakeSglang(stop_at=_FAKE_STOP, token_interval_s=0.002) as fake:
        yield Case(
            connect=functools.partial(_connect, fake.address, ApiKeys()),
            expected=expected,
            distribution=distribution,
            eos_token_id=token_at(_FAKE_STOP),
            has_model=False,
        )


def sglang_case(server: SglangServer, model_dir: Path) -> Case:
    return Case(
        connect=functools.partial(_connect, server.address, server.keys),
        expected=functools.partial(reference_logprobs, model_dir),
        distribution=functools.partial(exact_distribution, model_dir),
        eos_token_id=1,
    )


@contextlib.contextmanager
def local_case(model_dir: Path) -> Iterator[Case]:
    backend = LocalBackend(ModelConfig(path=model_dir, dtype="float32"), LocalConfig(), "cpu")
    yield Case(
        connect=functools.partial(backend.connect, "local"),
        expected=functools.partial(reference_logprobs, model_dir),
        distribution=functools.partial(exact_distribution, model_dir),
        eos_token_id=1,
        pause_modes=("retract",),
    )


async def _connect(address: str, keys: ApiKeys, **options: Any) -> Engine:
    return SglangClient(address, keys, request_timeout_s=60.0, **options)


@contextlib.asynccontextmanager
async def opened(case: Case, **options: Any) -> AsyncIterator[Engine]:
    """The engine, which is made to sample meanwhile if it does not by itself."""
    engine = await case.connect(**options)
    try:
        async with asyncio.TaskGroup() as tasks:
            steppers = [engine.stepper] if engine.stepper is not None else []
            drivers = [tasks.create_task(_drive(stepper)) for stepper in steppers]
            yield engine
            for driver in drivers:
                driver.cancel()
    finally:
        await engine.close()
        await engine.close()


async def _drive(stepper: Stepper) -> None:
    while True:
        num_steps = await stepper.decode(8)
        await asyncio.sleep(0 if num_steps else 0.01)


class Sink(Kept):
    """Knows when the first tokens came, too."""

    def __init__(self) -> None:
        super().__init__()
        self.has_tokens = asyncio.Event()

    def take(self, part: Completion) -> None:
        super().take(part)
        if len(part.token_ids):
            self.has_tokens.set()

    @property
    def num_tokens(self) -> int:
        return sum(len(part.token_ids) for part in self.parts)


class Response:
    """A request on its way."""

    def __init__(
        self,
        engine: Engine,
        max_new_tokens: int = LONG,
        *,
        prompt: Sequence[int] = PROMPT,
        temperature: float = 1.0,
        seed: int = 0,
        version: int = 0,
        top_logprobs: int = 0,
        **options: Any,
    ) -> None:
        self.prompt = list(prompt)
        self.temperature = temperature
        self.top_logprobs = top_logprobs
        self.sink = Sink()
        request = GenerateRequest(
            input_ids=prompt,
            sampling=SamplingSettings(temperature, max_new_tokens, seed=seed),
            label="contract",
            version=version,
            top_logprobs=top_logprobs,
            **{"stream_tokens": 8, **options},
        )
        self.task = asyncio.create_task(engine.stream(request, self.sink))

    async def end(self) -> Completion:
        """Wait for it; every piece but the last has the reason ABORT."""
        await self.task
        assert {part.finish_reason for part in self.sink.parts[:-1]} <= {"abort"}
        return self.sink.completion()

    async def is_on_its_way(self) -> bool:
        """Wait for its first tokens; whether more may come."""
        await self.sink.has_tokens.wait()
        return not self.task.done()

    def check(self, case: Case) -> Completion:
        """Tokens, log-probs and versions belong together; returns what came."""
        completion = self.sink.completion()
        num_tokens = len(completion.token_ids)
        assert completion.token_ids.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
        assert sum(span.num_tokens for span in completion.versions) == num_tokens
        if num_tokens:
            expected = case.expected(self.prompt, completion.token_ids, self.temperature)
            np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)
        self._check_likeliest(case, completion)
        return completion

    def _check_likeliest(self, case: Case, completion: Completion) -> None:
        """Every token has the K likeliest of its place, likeliest first, with log-probs."""
        assert len(completion.columns) == 2 * bool(self.top_logprobs)
        if not self.top_logprobs:
            return
        ids_RK = completion.columns["sampler_top_ids"]
        logprobs_RK = completion.columns["sampler_top_logprobs"]
        assert (ids_RK.dtype, logprobs_RK.dtype) == (np.int32, np.float32)
        assert ids_RK.shape == logprobs_RK.shape == (len(completion.token_ids), self.top_logprobs)
        if len(ids_RK):
            expected_RV = case.distribution(self.prompt, completion.token_ids, self.temperature)
            there_RK = np.take_along_axis(expected_RV, ids_RK, axis=1)
            np.testing.assert_allclose(logprobs_RK, there_RK, rtol=0, atol=1e-4)
            likeliest_RK = -np.sort(-expected_RV, axis=1)[:, : self.top_logprobs]
            np.testing.assert_allclose(logprobs_RK, likeliest_RK, rtol=0, atol=1e-4)
            assert all(len(set(row)) == self.top_logprobs for row in ids_RK.tolist())


async def abort_all(engine: Engine) -> None:
    while engine.num_in_flight:
        await engine.abort(timeout_s=60)
        await asyncio.sleep(0.01)
