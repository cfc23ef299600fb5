"""An engine pool whose engine samples only when it is told to, and where everything shows.

A token depends on its response, its position, the weights version, and which responses share the
decode step in which order: whatever differs between two runs changes all tokens that follow.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from bapo_megatron.data.staleness import spans_of
from bapo_megatron.engine.base import Completion, SamplingSettings
from bapo_megatron.errors import ServerGoneError
from bapo_megatron.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(eq=False)
class SteppedRequest:
    """A request inside the engine."""

    label: str
    seed: int | None
    order: tuple[int, int]
    position: int
    num_remaining: int
    on_part: Callable[[Completion], None]
    number: int | None = None
    """Its place among all that came; those that came between two bursts by ``order``."""
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.ABORT
    ended: asyncio.Future[Completion] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def sample(
        self, version: int, row: int, batch: Sequence[int | None], stop_interval: int
    ) -> None:
        token = zlib.crc32(repr((self.seed, self.position, version, row, batch)).encode())
        self.tokens.append(token >> 2)
        self.position += 1
        self.num_remaining -= 1
        if token % stop_interval == 0:
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
        self, version: int = 0, *, max_rows: int = 5, is_slow: bool = False, delay_seed: int = 0
    ) -> None:
        """Make an engine without requests.

        Args:
            version: Of its weights.
            max_rows: Responses in a decode step.
            is_slow: Requests need further turns of the event loop to come in, and to be gone.
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
        """How long a call takes; 0: not at all, or for a moment."""
        self.stop_interval = 12
        """One token in so many ends its response."""
        self._max_rows = max_rows
        self._num_turns = 2 * is_slow
        self._delays = random.Random(delay_seed)
        self._is_draining = False
        self._numbers = itertools.count()

    @property
    def num_in_flight(self) -> int:
        return len(self.requests)

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingSettings,
        *,
        label: str,
        affinity: int | None = None,
        order: tuple[int, int] = (0, 0),
        sampled_tokens: int = 0,
        return_logprobs: bool = True,
        on_part: Callable[[Completion], None],
    ) -> Completion | None:
        while True:
            while self.needs_weights and not self._is_draining:
                await asyncio.sleep(0.01)
            await self._turn()
            if self._is_draining:
                return None
            request = SteppedRequest(
                label, sampling.seed, order, sampled_tokens, sampling.max_new_tokens, on_part
            )
            self.requests.append(request)
            self.labels.append(label)
            try:
                completion = await request.ended
                await self._turn()
                return completion
            except ServerGoneError:
                sampled_tokens = request.position
                sampling = replace(sampling, max_new_tokens=request.num_remaining)
            finally:
                self.requests.remove(request)

    def lose(self) -> None:
        """The engine comes back at once, without its weights."""
        self.needs_weights = True
        for request in self.requests:
            if not request.ended.done():
                request.ended.set_exception(ServerGoneError("it is gone"))

    async def decode(self, max_steps: int) -> int:
        """``engine.base.Stepper``."""
        await asyncio.sleep(self.burst_s or self._delays.choice((0, 0, 0.0005)))
        arrived = [request for request in self.requests if request.number is None]
        for request in sorted(arrived, key=lambda request: request.order):
            request.number = next(self._numbers)
        running = [request for request in self.requests if not request.ended.done()]
        running.sort(key=lambda request: request.number)
        num_steps = 0
        while num_steps < max_steps and running:
            rows = running[: self._max_rows]
            batch = [request.seed for request in rows]
            for row, request in enumerate(rows):
                request.sample(self.version, row, batch, self.stop_interval)
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

    async def _turn(self) -> None:
        for _ in range(self._num_turns):
            await asyncio.sleep(0)

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
