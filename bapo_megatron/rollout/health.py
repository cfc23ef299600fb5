"""Asks every engine of a pool a cheap question again and again, and moves their states.

The question is ``Engine.version``: it needs no generation, and is answered while the engine is
paused or gets new weights. What samples, in a server another process, is asked
(``Engine.capabilities``) only where requests in flight get nothing for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Protocol

from bapo_megatron.errors import RolloutError, ServerError, ServerGoneError, describe_cause
from bapo_megatron.rollout.pooled_engine import EngineState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bapo_megatron.config.rollout import RolloutConfig
    from bapo_megatron.rollout.pooled_engine import PooledEngine

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
