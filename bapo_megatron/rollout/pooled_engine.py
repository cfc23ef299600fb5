"""One engine of the pool, and one response on its way over any number of them.

Asks every engine of a pool a cheap question again and again, and moves their states.

The question is ``Engine.version``: it needs no generation, and is answered while the engine is
paused or gets new weights. What samples, in a server another process, is asked
(``Engine.capabilities``) only where requests in flight get nothing for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from bapo_megatron.engine.base import CompletionSink, join
from bapo_megatron.errors import RolloutError, ServerError, ServerGoneError, describe_cause
from bapo_megatron.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bapo_megatron.config.rollout import RolloutConfig
    from bapo_megatron.engine.base import Completion, Engine, GenerateRequest
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
class PooledEngine:
    """One engine, as the pool sees it."""

    engine: Engine
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
        """Names the engine."""
        return self.engine.address

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


class Job(CompletionSink):
    """One response: what was asked for, and what came so far from whichever server."""

    _pooled: PooledEngine

    def __init__(
        self,
        request: GenerateRequest,
        on_part: Callable[[Completion], None],
        is_known: Callable[[int, int], bool],
        trace: RequestTrace,
    ) -> None:
        """Prepare the job.

        Args:
            request: What is wanted of all engines together; ``version`` is not looked at.
            on_part: Takes each piece.
            is_known: Whether the second of two weights versions may have sampled, after the first.
            trace: Records what happens.
        """
        super().__init__()
        self.trace = trace
        self._request = request
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
    def label(self) -> str:
        """Names it in errors."""
        return self._request.label

    @property
    def num_remaining(self) -> int:
        """Tokens that may still come."""
        return self._request.sampling.max_new_tokens - self.num_tokens

    @property
    def num_received(self) -> int:
        """Tokens since it was sent the last time."""
        return self.num_tokens - self._num_before

    def start(self, pooled: PooledEngine, version: int) -> GenerateRequest:
        """It goes to an engine with ``version``; returns what that one has to do."""
        self._pooled = pooled
        self._oldest_version = version
        self._num_before = self.num_tokens
        self.was_sent = True
        self.trace.sent(pooled.address, self.num_tokens)
        request = self._request
        return replace(
            request,
            input_ids=[*request.input_ids, *self.completion().token_ids.tolist()],
            sampling=replace(request.sampling, max_new_tokens=self.num_remaining),
            version=version,
            sampled_tokens=request.sampled_tokens + self.num_tokens,
        )

    def is_known(self, version: int) -> bool:
        """Whether this weights version may have sampled."""
        return self._is_known(self._oldest_version, version)

    def first_tokens(self, cached_tokens: int) -> None:
        """The first tokens of a server came."""
        self.trace.first_tokens(cached_tokens)

    def take(self, part: Completion) -> None:
        """Keep a piece and hand it on."""
        if len(part.token_ids):
            self.num_failures = self._pooled.num_broken = 0
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
        self._engine_by_affinity: dict[int, PooledEngine] = {}

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

    def choose(self, usable: Sequence[PooledEngine], affinity: int | None) -> PooledEngine:
        """The engine for a request, out of at least one."""
        least_busy = min(usable, key=lambda pooled: pooled.load)
        chosen = None if affinity is None else self._engine_by_affinity.get(affinity)
        most_load = _MOST_LOAD_RATIO * least_busy.load + _LOAD_SLACK
        if chosen is None or chosen not in usable or chosen.load > most_load:
            chosen = least_busy
        if affinity is not None:
            self._engine_by_affinity[affinity] = chosen
        return chosen


_SHORTEST_INTERVAL_S = 1.0
_ADMISSION_TIMEOUT_S = 120.0
"""For what a server is asked once: how it was started, and the probe of its log-probs."""
_STUCK_FACTOR = 4.0
"""A scheduler may stand still while it compiles kernels; the watchdogs of servers wait minutes."""


class HealthListener(Protocol):
    """Decides what an observation means."""

    async def admit(self, pooled: PooledEngine) -> None:
        """Look at a server that answers for the first time, or again; it is not used before.

        Raises:
            RolloutError: It must not be used.
        """
        ...

    def on_answer(self, pooled: PooledEngine, reported: str) -> None:
        """An admitted server reports this weights version."""
        ...

    def on_refusal(self, pooled: PooledEngine, error: RolloutError) -> None:
        """It answers, but cannot be used as it is."""
        ...

    def on_silence(self, pooled: PooledEngine, reason: str) -> None:
        """It does not answer, or its requests do not get on."""
        ...


class Monitor:
    """One task per engine."""

    def __init__(self, config: RolloutConfig, listener: HealthListener) -> None:
        """Prepare; ``start`` starts.

        Args:
            config: How often to ask, and how long to wait.
            listener: Learns what is observed.
        """
        self._config = config.health
        self._longest_silence_s = config.request_timeout_s
        self._listener = listener
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, engines: Sequence[PooledEngine]) -> None:
        """Watch these engines from now on; does nothing if it does already."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._watch(pooled)) for pooled in engines]

    def raise_failure(self) -> None:
        """Raise what ended a task: a mistake of this program, after which nobody watches a server.

        Whatever a server does moves its state only.
        """
        for task in self._tasks:
            if task.done():
                task.result()

    async def close(self) -> None:
        """End the tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, pooled: PooledEngine) -> None:
        answered_s = scheduled_s = time.monotonic()
        while True:
            try:
                known = pooled.version
                reported = await self._ask(pooled, answered_s)
                answered_s = time.monotonic()
                if pooled.state in (EngineState.STARTING, EngineState.LOST):
                    async with asyncio.timeout(_ADMISSION_TIMEOUT_S):
                        await self._listener.admit(pooled)
                # An answer from before weights were updated tells nothing about them.
                if pooled.version == known:
                    self._listener.on_answer(pooled, reported)
                scheduled_s = await self._check_scheduler(pooled, scheduled_s)
            except (ServerError, TimeoutError) as error:
                if pooled.state is EngineState.STARTING:
                    pooled.reason = f"it never answered ({describe_cause(error)})"
                elif time.monotonic() - answered_s >= self._config.timeout_s:
                    self._listener.on_silence(
                        pooled,
                        f"no answer for {self._config.timeout_s:g} s "
                        f"({describe_cause(error)}; rollout.health.timeout_s)",
                    )
            except RolloutError as error:
                self._listener.on_refusal(pooled, error)
            await asyncio.sleep(self._interval_s(pooled))

    async def _ask(self, pooled: PooledEngine, answered_s: float) -> str:
        """The weights version; waits no longer than the silence that is allowed."""
        limit_s = answered_s + self._config.timeout_s - time.monotonic()
        # Never 0, so that a server is not blamed where this process itself stood still.
        return await pooled.engine.version(max(limit_s, self._config.interval_s))

    async def _check_scheduler(self, pooled: PooledEngine, scheduled_s: float) -> float:
        """Make sure that requests in flight get on, or at least that the scheduler lives.

        It may give nobody a token for long, as while it compiles kernels, but answers in between.

        Args:
            pooled: The engine, which answers.
            scheduled_s: When its scheduler was heard of last.

        Returns:
            When it was heard of last now.
        """
        silence_s = pooled.engine.silence_s
        if silence_s >= self._longest_silence_s:
            self._listener.on_silence(
                pooled,
                f"no token of any request within {self._longest_silence_s:g} s; raise "
                "rollout.request_timeout_s, or look for a stuck server in its log",
            )
            return time.monotonic()
        scheduled_s = max(scheduled_s, time.monotonic() - silence_s)
        if silence_s < self._config.timeout_s:
            return scheduled_s
        with contextlib.suppress(ServerGoneError):
            await pooled.engine.capabilities(self._config.timeout_s)
            return time.monotonic()
        longest_s = _STUCK_FACTOR * self._config.timeout_s
        if time.monotonic() - scheduled_s >= longest_s:
            self._listener.on_silence(
                pooled,
                f"its scheduler has neither sampled nor answered for {longest_s:g} s "
                f"({_STUCK_FACTOR:g} times rollout.health.timeout_s)",
            )
        return scheduled_s

    def _interval_s(self, pooled: PooledEngine) -> float:
        is_expected = pooled.state in (EngineState.STARTING, EngineState.LOST)
        interval_s = self._config.interval_s
        return min(interval_s, _SHORTEST_INTERVAL_S) if is_expected else interval_s
