"""An engine pool whose engine samples only when it is told to, and where everything shows.

A token depends on its response, its position, the weights version, and which responses share the
decode step in which order: whatever differs between two runs changes all tokens that follow.
"""

import asyncio
import itertools
import random
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from bapo_megatron.data.record import Completion, EnoughTokensError
from bapo_megatron.data.staleness import spans_of
from bapo_megatron.engine.base import GenerateRequest
from bapo_megatron.errors import ServerGoneError
from bapo_megatron.types import FinishReason
from tests.fakes.fake_pool import FakePool, Request, likeliest_of


class SteppedRequest(Request):
    """A request inside the engine."""

    def __init__(self, asked: GenerateRequest, on_part: Callable[[Completion], None]) -> None:
        super().__init__(asked, on_part)
        self.number: int | None = None
        """Its place among all that came; those that came between two bursts by ``order``."""
        self.tokens: list[int] = []
        self.finish_reason = FinishReason.ABORT

    def sample(
        self, version: int, row: int, batch: Sequence[int | None], stop_interval: int
    ) -> None:
        token = zlib.crc32(repr((self.seed, self.received, version, row, batch)).encode())
        self.tokens.append(token >> 2)
        self.received += 1
        if token % stop_interval == 0:
            self.finish_reason = FinishReason.STOP
        elif self.received == self.max_tokens:
            self.finish_reason = FinishReason.LENGTH

    def take(self, version: int) -> Completion:
        tokens = np.array(self.tokens, dtype=np.int32)
        logprobs = (-(tokens % 1009) / 101 - 1).astype(np.float32)
        versions = spans_of(np.full(len(tokens), version))
        self.tokens = []
        columns = likeliest_of(tokens, self.top_logprobs)
        return Completion(tokens, logprobs, versions, self.finish_reason, columns=columns)


class SteppedPool(FakePool):
    """The part of ``EnginePool`` that generation and evaluation use; its own stepper."""

    requests: list[SteppedRequest]

    def __init__(
        self, version: int = 0, *, max_rows: int = 5, is_slow: bool = False, delay_seed: int = 0
    ) -> None:
        """``max_rows`` responses share a decode step, whose time ``delay_seed`` decides.

        With ``is_slow`` requests need further turns of the event loop to come in, and to be gone.
        """
        super().__init__(version)
        self.stepper = self
        self.bursts: list[int] = []
        """Decode steps of each call."""
        self.burst_s = 0.0
        """How long a call takes; 0: not at all, or for a moment."""
        self.stop_interval = 12
        """One token in so many ends its response."""
        self._max_rows = max_rows
        self._num_turns = 2 * is_slow
        self._delays = random.Random(delay_seed)
        self._numbers = itertools.count()

    @property
    def num_in_flight(self) -> int:
        return len(self.requests)

    @property
    def labels(self) -> list[str]:
        """The labels of all requests, in the order in which they came."""
        return [request.label for request in self.sent]

    async def generate(
        self,
        plan: Callable[[], GenerateRequest | None],
        on_part: Callable[[Completion], None],
        affinity: int | None = None,
    ) -> bool:
        while True:
            while self.needs_weights and not self._is_draining:
                await asyncio.sleep(0.01)
            try:
                return await super().generate(plan, on_part)
            except ServerGoneError:
                continue

    def _accept(
        self, asked: GenerateRequest, on_part: Callable[[Completion], None]
    ) -> SteppedRequest:
        return SteppedRequest(asked, on_part)

    async def _turn(self) -> None:
        for _ in range(self._num_turns):
            await asyncio.sleep(0)

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
                has_ended = part.finish_reason is not FinishReason.ABORT
                try:
                    request.on_part(part)
                except EnoughTokensError:
                    has_ended = True
                if has_ended:
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
