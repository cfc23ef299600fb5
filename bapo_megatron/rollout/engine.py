"""One server of the pool, and one response on its way over any number of them."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from bapo_megatron.engine.base import CompletionSink, join
from bapo_megatron.engine.sglang.weights import SglangWeightControl
from bapo_megatron.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bapo_megatron.engine.base import Completion, SamplingSettings
    from bapo_megatron.engine.sglang.client import SglangClient
    from bapo_megatron.rollout.timeline import RequestTrace

_MOST_LOAD_RATIO = 1.25
_LOAD_SLACK = 4.0
"""Requests share a server while it has at most 1.25 times the least busy one's, and 4 more."""


class EngineState(StrEnum):
    """What a server may be used for."""

    STARTING = "starting"
    """It has never answered."""
    USABLE = "usable"
    """It answers and holds the pool's weights version."""
    STALE = "stale"
    """It answers but must get weights first."""
    LOST = "lost"
    """It failed; nothing is sent but the monitor's questions."""


@dataclass(slots=True, eq=False)
class Engine:
    """One server, as the pool sees it."""

    client: SglangClient
    state: EngineState = EngineState.STARTING
    reason: str = "it has not answered yet"
    """Why it is not usable, for people."""
    version: str | None = None
    """The weights version that it has, as far as is known."""
    num_ranks: int = 1
    """Processes that share its model."""
    num_requests: int = 0
    """Requests that the pool has given it."""
    num_broken: int = 0
    """Connections for samples that broke one after the other since its last token came."""
    is_paused: bool = False
    """It was told to sample nothing."""

    @property
    def address(self) -> str:
        """``http://host:port``."""
        return self.client.address

    @property
    def load(self) -> float:
        """Requests per rank."""
        return self.num_requests / self.num_ranks

    @property
    def is_usable(self) -> bool:
        """Whether it answers and holds the pool's weights version."""
        return self.state is EngineState.USABLE

    @property
    def is_answering(self) -> bool:
        """Whether it is usable, or would be with the pool's weights."""
        return self.state in (EngineState.USABLE, EngineState.STALE)

    @property
    def is_lost(self) -> bool:
        """Whether it was taken out."""
        return self.state is EngineState.LOST

    async def weight_control(self, timeout_s: float) -> SglangWeightControl:
        """Ask the server how it was started; returns its calls for new weights.

        Raises:
            ServerError: It does not answer as it should.
            RolloutError: It refuses, or its SGLang is too old.
        """
        return SglangWeightControl(self.client, await self.client.ask_info(timeout_s))


class Job(CompletionSink):
    """One response: what was asked for, and what came so far from whichever server."""

    _engine: Engine

    def __init__(
        self,
        input_ids: Sequence[int],
        sampling: SamplingSettings,
        on_part: Callable[[Completion], None],
        is_known: Callable[[int, int], bool],
        trace: RequestTrace,
    ) -> None:
        """Prepare the job.

        Args:
            input_ids: Prompt, and what was sampled before.
            sampling: How to sample; its length counts over all servers.
            on_part: Takes each piece.
            is_known: Whether the second of two weights versions may have sampled, after the first.
            trace: Records what happens.
        """
        super().__init__()
        self.sampling = sampling
        self.trace = trace
        self._input_ids = input_ids
        self._on_part = on_part
        self._is_known = is_known
        self._oldest_version = 0
        self._num_before = 0
        self.num_tokens = 0
        """Received so far."""
        self.was_sent = False
        """Whether any server got it."""
        self.num_failures = 0
        """How often a server failed it since the last token came."""

    @property
    def num_remaining(self) -> int:
        """Tokens that may still come."""
        return self.sampling.max_new_tokens - self.num_tokens

    @property
    def num_received(self) -> int:
        """Tokens since it was sent the last time."""
        return self.num_tokens - self._num_before

    def start(self, engine: Engine, version: int) -> list[int]:
        """It goes to a server with ``version``; returns what that server has to continue."""
        self._engine = engine
        self._oldest_version = version
        self._num_before = self.num_tokens
        self.was_sent = True
        self.trace.sent(engine.address, self.num_tokens)
        return [*self._input_ids, *self.completion().token_ids.tolist()]

    def is_known(self, version: int) -> bool:
        """Whether this weights version may have sampled."""
        return self._is_known(self._oldest_version, version)

    def first_tokens(self, cached_tokens: int) -> None:
        """The first tokens of a server came."""
        self.trace.first_tokens(cached_tokens)

    def take(self, part: Completion) -> None:
        """Keep a piece and hand it on."""
        if len(part.token_ids):
            self.num_failures = self._engine.num_broken = 0
        self.num_tokens += len(part.token_ids)
        super().take(part)
        self._on_part(part)

    def end_at_limit(self) -> None:
        """The server was lost after the last token that may come."""
        self.take(join([], FinishReason.LENGTH))
        self.trace.ended(FinishReason.LENGTH.value, 0)


class Balancer:
    """Chooses servers: one for requests that share a prompt, unless another has much less to do.

    A cached prompt saves little beside a long response: in the simulation of docs/benchmarks whole
    groups on one server made the end of a step 1.4 times as long.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        """Requests on their way."""
        self._num_by_affinity: Counter[int] = Counter()
        self._engine_by_affinity: dict[int, Engine] = {}

    @contextlib.contextmanager
    def call(self, affinity: int | None) -> Iterator[None]:
        """A request is on its way; its affinity is remembered as long as it has one."""
        self.num_calls += 1
        if affinity is not None:
            self._num_by_affinity[affinity] += 1
        try:
            yield
        finally:
            self.num_calls -= 1
            if affinity is not None:
                self._num_by_affinity[affinity] -= 1
                if not self._num_by_affinity[affinity]:
                    del self._num_by_affinity[affinity]
                    self._engine_by_affinity.pop(affinity, None)

    def choose(self, usable: Sequence[Engine], affinity: int | None) -> Engine:
        """The server for a request, out of at least one."""
        least_busy = min(usable, key=lambda engine: engine.load)
        engine = None if affinity is None else self._engine_by_affinity.get(affinity)
        most_load = _MOST_LOAD_RATIO * least_busy.load + _LOAD_SLACK
        if engine is None or engine not in usable or engine.load > most_load:
            engine = least_busy
        if affinity is not None:
            self._engine_by_affinity[affinity] = engine
        return engine
