"""An engine in this process whose requests a test answers."""

import asyncio
from dataclasses import dataclass

import numpy as np

from bapo_megatron.data.record import Completion
from bapo_megatron.data.staleness import spans_of
from bapo_megatron.engine.base import Capabilities, CompletionSink, GenerateRequest, Stepper
from bapo_megatron.types import FinishReason


@dataclass(eq=False)
class Flight:
    """A request; ``ended`` returns or raises what its ``stream`` does."""

    request: GenerateRequest
    sink: CompletionSink
    ended: asyncio.Future[None]

    def give(self, token_ids: list[int], reason: FinishReason = FinishReason.ABORT) -> None:
        """Let it receive tokens of version 0, and end if it has a reason to."""
        tokens = np.array(token_ids, np.int32)
        versions = spans_of(np.zeros(len(tokens), np.int64))
        self.sink.take(Completion(tokens, np.zeros(len(tokens), np.float32), versions, reason))
        if reason is not FinishReason.ABORT:
            self.ended.set_result(None)


class FakeEngine:
    """What the pool needs of an ``Engine`` that never fails."""

    address = "in this process"
    silence_s = 0.0

    def __init__(self, stepper: Stepper | None = None) -> None:
        self.stepper = stepper
        self.flights: list[Flight] = []
        """Every request that it got."""

    @property
    def num_in_flight(self) -> int:
        return sum(not flight.ended.done() for flight in self.flights)

    async def stream(self, request: GenerateRequest, sink: CompletionSink) -> None:
        flight = Flight(request, sink, asyncio.get_running_loop().create_future())
        self.flights.append(flight)
        await flight.ended

    async def version(self, timeout_s: float | None = None) -> str:
        return "0"

    async def capabilities(self, timeout_s: float | None = None) -> Capabilities:
        return Capabilities(1, frozenset({"broadcast", "disk"}))

    async def check(self) -> None:
        pass

    async def close(self) -> None:
        for flight in self.flights:
            flight.ended.cancel()


class NoStepper:
    """A ``Stepper`` of an engine that never samples."""

    async def decode(self, max_steps: int) -> int:
        return 0
