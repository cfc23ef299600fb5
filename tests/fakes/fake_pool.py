"""An engine pool without servers, of which a test decides when each request gets what.

Token ``t`` of a response has id ``t``, and its log-prob tells its position and version, so that
misplaced or misattributed tokens are seen. Ids from ``WRITTEN`` are an environment's.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Self

import numpy as np

from bapo_megatron.data.record import Completion
from bapo_megatron.data.staleness import spans_of
from bapo_megatron.engine.base import GenerateRequest
from bapo_megatron.types import FinishReason, RolloutBatch, Sample, SampleText

WRITTEN = 1000
"""The least id of what environments write."""
_PROMPT_TOKENS = 2


def logprobs_of(token_ids: np.ndarray, versions: np.ndarray) -> np.ndarray:
    """[R] float32 log-probs that only these tokens of these versions have."""
    return (-(token_ids + 1) / 16 - 100 * versions).astype(np.float32)


def part_of(first: int, count: int, version: int, finish_reason: FinishReason) -> Completion:
    """Tokens ``first``, ``first`` + 1, … of a response."""
    token_ids = np.arange(first, first + count, dtype=np.int32)
    versions = np.full(count, version)
    logprobs = logprobs_of(token_ids, versions)
    return Completion(token_ids, logprobs, spans_of(versions), finish_reason)


def likeliest_of(token_ids: np.ndarray, num_top: int) -> dict[str, np.ndarray]:
    """[R, K] columns that only these tokens have; none where K is 0."""
    ids_RK = token_ids[:, None] // 2 + np.arange(num_top, dtype=np.int32)
    logprobs_RK = (-(ids_RK % 1013) / 103).astype(np.float32)
    columns = {"sampler_top_ids": ids_RK, "sampler_top_logprobs": logprobs_RK}
    return columns if num_top else {}


def assert_likeliest(samples: Iterable[Sample], num_top: int) -> None:
    """Check that every sampled token of these episodes has its own columns."""
    for sequence in (s for sample in samples for s in sample.sequences if s.num_sampled):
        for name, values in likeliest_of(sequence.sampled_token_ids, num_top).items():
            assert sequence.columns[name].dtype == values.dtype
            np.testing.assert_array_equal(sequence.columns[name], values)


async def deliver(batch: RolloutBatch, texts: Sequence[SampleText]) -> None:
    """Hands a batch over that nobody takes."""


class Request:
    """A request that waits for the test."""

    def __init__(self, asked: GenerateRequest, on_part: Callable[[Completion], None]) -> None:
        self.label, self.order = asked.label, asked.order
        self.seed = asked.sampling.seed
        self.top_logprobs = asked.top_logprobs
        self.input_ids = tuple(asked.input_ids)
        self.received = asked.sampled_tokens
        """Response tokens so far, those of earlier requests included."""
        self.asked_tokens = asked.sampling.max_new_tokens
        """Limit of this request's own tokens."""
        self.max_tokens = self.received + self.asked_tokens
        """Limit of response tokens, likewise."""
        self.on_part = on_part
        self.ended: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()


class FakePool:
    """The part of ``EnginePool`` that generation uses."""

    stepper = None

    def __init__(self, version: int | None = 0) -> None:
        self.version = version
        self.needs_weights = False
        self.num_lost_requests = self.num_retractions = 0
        self.requests: list[Request] = []
        """Those that have not ended."""
        self.sent: list[Request] = []
        """All, in the order in which they came."""
        self.calls: list[str] = []
        self.on_drain: Callable[[], None] | None = None
        """What else happens while requests are aborted."""
        self._is_draining = False

    @property
    def states(self) -> Self:
        """Its own: there is one engine."""
        return self

    def take_load(self) -> dict[str, float]:
        return {}

    async def generate(
        self,
        plan: Callable[[], GenerateRequest | None],
        on_part: Callable[[Completion], None],
        affinity: int | None = None,
    ) -> bool:
        await self._turn()
        if self._is_draining:
            return False
        asked = plan()
        assert asked is not None
        request = self._accept(asked, on_part)
        self.requests.append(request)
        self.sent.append(request)
        try:
            await request.ended
            await self._turn()
            return True
        finally:
            self.requests.remove(request)

    def _accept(self, asked: GenerateRequest, on_part: Callable[[Completion], None]) -> Request:
        assert asked.sampling.max_new_tokens > 0
        response = asked.input_ids[_PROMPT_TOKENS:]
        assert asked.sampled_tokens == len(response)
        for position, token in enumerate(response):
            assert token == position or token >= WRITTEN
        return Request(asked, on_part)

    async def _turn(self) -> None:
        """Requests come and go at once."""

    def give(self, request: Request, count: int, finish: FinishReason = FinishReason.ABORT) -> None:
        """Let a request receive tokens, and end if it has a reason to."""
        assert self.version is not None
        count = min(count, request.max_tokens - request.received)
        if request.received + count == request.max_tokens and finish is FinishReason.ABORT:
            finish = FinishReason.LENGTH
        part = part_of(request.received, count, self.version, finish)
        request.received += count
        request.on_part(part)
        if finish is not FinishReason.ABORT:
            request.ended.set_result(part)

    async def drain(self) -> None:
        self.calls.append("drain")
        self._is_draining = True
        if self.on_drain is not None:
            self.on_drain()
            for _ in range(4):  # an abort takes its time
                await asyncio.sleep(0)
        for request in list(self.requests):
            if not request.ended.done():
                request.ended.set_result(part_of(request.received, 0, 0, FinishReason.ABORT))
        while self.requests:
            await asyncio.sleep(0)

    def reopen(self) -> None:
        self.calls.append("reopen")
        self._is_draining = False

    async def pause(self, mode: str) -> None:
        self.calls.append(f"pause {mode}")

    async def resume(self) -> None:
        self.calls.append("resume")
