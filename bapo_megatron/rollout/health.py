"""Asks every server of a pool a cheap question again and again, and moves their states.

The question is ``/model_info``: it needs no generation, is answered while the server is paused or
gets new weights, and tells the weights version. ``/health`` would generate a token and is 503 while
the server is paused. The scheduler, another process, is asked (``/server_info``) only where
requests in flight get nothing for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Protocol

from bapo_megatron.errors import RolloutError, ServerError, ServerGoneError
from bapo_megatron.rollout.engine import EngineState
from bapo_megatron.engine.sglang.http import describe_cause

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bapo_megatron.config.rollout import RolloutConfig
    from bapo_megatron.rollout.engine import Engine

_SHORTEST_INTERVAL_S = 1.0
_ADMISSION_TIMEOUT_S = 120.0
"""For what a server is asked once: how it was started, and the probe of its log-probs."""
_STUCK_FACTOR = 4.0
"""A scheduler may stand still while it compiles kernels; SGLang's own watchdog waits 300 s."""


class HealthListener(Protocol):
    """Decides what an observation means."""

    async def admit(self, engine: Engine) -> None:
        """Look at a server that answers for the first time, or again; it is not used before.

        Raises:
            RolloutError: It must not be used.
        """
        ...

    def on_answer(self, engine: Engine, reported: str) -> None:
        """An admitted server reports this weights version."""
        ...

    def on_refusal(self, engine: Engine, error: RolloutError) -> None:
        """It answers, but cannot be used as it is."""
        ...

    def on_silence(self, engine: Engine, reason: str) -> None:
        """It does not answer, or its requests do not get on."""
        ...


class Monitor:
    """One task per server."""

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

    def start(self, engines: Sequence[Engine]) -> None:
        """Watch these servers from now on; does nothing if it does already."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._watch(engine)) for engine in engines]

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

    async def _watch(self, engine: Engine) -> None:
        answered_s = scheduled_s = time.monotonic()
        while True:
            try:
                known = engine.version
                reported = await self._ask(engine, answered_s)
                answered_s = time.monotonic()
                if engine.state in (EngineState.STARTING, EngineState.LOST):
                    async with asyncio.timeout(_ADMISSION_TIMEOUT_S):
                        await self._listener.admit(engine)
                # An answer from before weights were updated tells nothing about them.
                if engine.version == known:
                    self._listener.on_answer(engine, reported)
                scheduled_s = await self._check_scheduler(engine, scheduled_s)
            except (ServerError, TimeoutError) as error:
                if engine.state is EngineState.STARTING:
                    engine.reason = f"it never answered ({describe_cause(error)})"
                elif time.monotonic() - answered_s >= self._config.timeout_s:
                    self._listener.on_silence(
                        engine,
                        f"no answer for {self._config.timeout_s:g} s "
                        f"({describe_cause(error)}; rollout.health.timeout_s)",
                    )
            except RolloutError as error:
                self._listener.on_refusal(engine, error)
            await asyncio.sleep(self._interval_s(engine))

    async def _ask(self, engine: Engine, answered_s: float) -> str:
        """The weights version; waits no longer than the silence that is allowed."""
        limit_s = answered_s + self._config.timeout_s - time.monotonic()
        # Never 0, so that a server is not blamed where this process itself stood still.
        return await engine.client.version(max(limit_s, self._config.interval_s))

    async def _check_scheduler(self, engine: Engine, scheduled_s: float) -> float:
        """Make sure that requests in flight get on, or at least that the scheduler lives.

        It may give nobody a token for long, as while it compiles kernels, but answers in between.

        Args:
            engine: The server, which answers.
            scheduled_s: When its scheduler was heard of last.

        Returns:
            When it was heard of last now.
        """
        silence_s = engine.client.silence_s
        if silence_s >= self._longest_silence_s:
            self._listener.on_silence(
                engine,
                f"no token of any request within {self._longest_silence_s:g} s; raise "
                "rollout.request_timeout_s, or look for a stuck server in its log",
            )
            return time.monotonic()
        scheduled_s = max(scheduled_s, time.monotonic() - silence_s)
        if silence_s < self._config.timeout_s:
            return scheduled_s
        with contextlib.suppress(ServerGoneError):
            await engine.client.ask_info(self._config.timeout_s)
            return time.monotonic()
        longest_s = _STUCK_FACTOR * self._config.timeout_s
        if time.monotonic() - scheduled_s >= longest_s:
            self._listener.on_silence(
                engine,
                f"its scheduler has neither sampled nor answered for {longest_s:g} s "
                f"({_STUCK_FACTOR:g} times rollout.health.timeout_s)",
            )
        return scheduled_s

    def _interval_s(self, engine: Engine) -> float:
        is_expected = engine.state in (EngineState.STARTING, EngineState.LOST)
        interval_s = self._config.interval_s
        return min(interval_s, _SHORTEST_INTERVAL_S) if is_expected else interval_s
