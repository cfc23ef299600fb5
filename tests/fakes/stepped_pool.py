"""An engine pool whose engine samples only when it is told to, and where everything shows.

A token depends on its response, its position, the weights version, and which responses share the
decode step in which order: whatever differs between two runs changes all tokens that follow.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bapo_megatron.data.version_spans import spans_of
from bapo_megatron.engine.base import Completion, SamplingSettings
from bapo_megatron.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_STOP_SHARE = 12
"""One token in so many ends its response."""


@dataclass(eq=False)
class SteppedRequest:
    """A request inside the engine."""

    label: str
    seed: int | None
    position: int
    num_remaining: int
    on_part: Callable[[Completion], None]
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.ABORT
    ended: asyncio.Future[Completion] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def sample(self, version: int, row: int, batch: Sequence[int | None]) -> None:
        token = zlib.crc32(repr((self.seed, self.position, version, row, batch)).encode())
        self.tokens.append(token >> 2)
        self.position += 1
        self.num_remaining -= 1
        if token % _STOP_SHARE == 0:
            self.finish_reason = FinishReason.STOP
        elif not self.num_remaining:
            self.finish_reason = FinishReason.LENGTH

    def take(self, version: int) -> Completion:
        tokens = np.array(self.tokens, dtype=np.int32)
        logprobs = (-(tokens % 1009) / 101 - 1).astype(np.float32)
        versions = spans_of(np.full(len(tokens), version))
        self.tokens = []
        return Completion(tokens, logprobs, versions, self.finish_reason)


class SteppedPool:
    """The part of ``EnginePool`` that generation and evaluation use; its own stepper."""

    def __init__(
        self, version: int = 0, *, max_rows: int = 5, ends_late: bool = False, delay_seed: int = 0
    ) -> None:
        """Make an engine without requests.

        Args:
            version: Of its weights.
            max_rows: Responses in a decode step.
            ends_late: A request counts as in flight until its task has gone on.
            delay_seed: Of the time that a decode step takes.
        """
        self.version = version
        self.needs_weights = False
        self.num_lost_requests = 0
        self.stepper = self
        self.requests: list[SteppedRequest] = []
        """Inside the engine, in the order in which they came."""
        self.bursts: list[int] = []
        """Decode steps of each call."""
        self.labels: list[str] = []
        """Of all requests, in the order in which they came."""
        self.calls: list[str] = []
        self.burst_s = 0.0
        self._max_rows = max_rows
        self._ends_late = ends_late
        self._delays = random.Random(delay_seed)
        self._is_draining = False

    @property
    def num_in_flight(self) -> int:
        return sum(self._ends_late or not request.ended.done() for request in self.requests)

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingSettings,
        *,
        label: str,
        affinity: int | None = None,
        sampled_tokens: int = 0,
        return_logprobs: bool = True,
        on_part: Callable[[Completion], None],
    ) -> Completion | None:
        while self.needs_weights and not self._is_draining:
            await asyncio.sleep(0.01)
        if self._is_draining:
            return None
        request = SteppedRequest(
            label, sampling.seed, sampled_tokens, sampling.max_new_tokens, on_part
        )
        self.requests.append(request)
        self.labels.append(label)
        try:
            return await request.ended
        finally:
            self.requests.remove(request)

    async def decode(self, most_steps: int) -> int:
        """``engine.base.Stepper``."""
        await asyncio.sleep(self.burst_s or self._delays.choice((0, 0, 0.0005)))
        running = [request for request in self.requests if not request.ended.done()]
        num_steps = 0
        while num_steps < most_steps and running:
            rows = running[: self._max_rows]
            batch = [request.seed for request in rows]
            for row, request in enumerate(rows):
                request.sample(self.version, row, batch)
            running = [r for r in running if r.finish_reason is FinishReason.ABORT]
            num_steps += 1
        for request in list(self.requests):
            if request.tokens:
                part = request.take(self.version)
                request.on_part(part)
                if part.finish_reason is not FinishReason.ABORT:
                    request.ended.set_result(part)
        self.bursts.append(num_steps)
        return num_steps

    async def drain(self) -> None:
        self.calls.append("drain")
        self._is_draining = True
        for request in self.requests:
            if not request.ended.done():
                request.ended.set_result(request.take(self.version))
        while self.requests:
            await asyncio.sleep(0)

    def reopen(self) -> None:
        self._is_draining = False
