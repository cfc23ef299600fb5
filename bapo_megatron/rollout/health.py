"""Asks every server of a pool a cheap question again and again, and moves their states.

The question is ``/model_info``: it needs no generation, is answered while the server is paused or
gets new weights, and tells the weights version. ``/health`` would generate a token and is 503 while
the server is paused.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import httpx

from bapo_megatron.rollout.base import RolloutError
from bapo_megatron.rollout.engine import EngineState
from bapo_megatron.rollout.sglang_http import ServerError, describe_cause

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bapo_megatron.config.rollout import HealthConfig
    from bapo_megatron.rollout.engine import Engine

_SHORTEST_INTERVAL_S = 1.0
_ADMISSION_TIMEOUT_S = 120.0
"""For what a server is asked once: how it was started, and the probe of its log-probs."""


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
        """It has answered none of the questions of ``health.timeout_s``."""
        ...


class Monitor:
    """One task per server."""

    def __init__(self, config: HealthConfig, listener: HealthListener) -> None:
        """Prepare; ``start`` starts.

        Args:
            config: How often to ask, and how long to wait.
            listener: Learns what is observed.
        """
        self._config = config
        self._listener = listener
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, engines: Sequence[Engine]) -> None:
        """Watch these servers from now on; does nothing if it does already."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._watch(engine)) for engine in engines]

    async def close(self) -> None:
        """End the tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, engine: Engine) -> None:
        clock_s = asyncio.get_running_loop().time
        last_answer_s = clock_s()
        while True:
            try:
                known = engine.version
                reported = await self._ask(engine, last_answer_s)
                last_answer_s = clock_s()
                if engine.state in (EngineState.STARTING, EngineState.LOST):
                    async with asyncio.timeout(_ADMISSION_TIMEOUT_S):
                        await self._listener.admit(engine)
                # An answer from before weights were updated tells nothing about them.
                if engine.version == known:
                    self._listener.on_answer(engine, reported)
            except (ServerError, TimeoutError, httpx.TransportError) as error:
                if engine.state is EngineState.STARTING:
                    engine.reason = f"it never answered ({describe_cause(error)})"
                elif clock_s() - last_answer_s >= self._config.timeout_s:
                    self._listener.on_silence(
                        engine,
                        f"no answer for {self._config.timeout_s:g} s "
                        f"({describe_cause(error)}; rollout.health.timeout_s)",
                    )
            except RolloutError as error:
                self._listener.on_refusal(engine, error)
            await asyncio.sleep(self._interval_s(engine))

    async def _ask(self, engine: Engine, last_answer_s: float) -> str:
        """The weights version; waits no longer than the silence that is allowed."""
        now_s = asyncio.get_running_loop().time()
        # Never 0, so that a server is not blamed where this process itself stood still.
        limit_s = max(last_answer_s + self._config.timeout_s - now_s, self._config.interval_s)
        async with asyncio.timeout(limit_s):
            return await engine.client.ask_version()

    def _interval_s(self, engine: Engine) -> float:
        is_expected = engine.state in (EngineState.STARTING, EngineState.LOST)
        interval_s = self._config.interval_s
        return min(interval_s, _SHORTEST_INTERVAL_S) if is_expected else interval_s
