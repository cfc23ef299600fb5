"""Which engines of a run may be used.

An engine is used only while it answers and holds the pool's weights version. One that dies, hangs
or answers nonsense is lost. When it answers again it needs weights first, whatever version it
reports: it may be another process.

    starting ──answers──▶ usable ◀──weights── stale ◀──answers── lost
        └──answers, other weights──────────────▲                  ▲
                                 usable, stale ────fails──────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from bapo_megatron.engine.base import Needs
from bapo_megatron.errors import RolloutError
from bapo_megatron.rollout.health import Monitor
from bapo_megatron.rollout.pooled_engine import EngineState, PooledEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from bapo_megatron.config.rollout import RolloutConfig
    from bapo_megatron.engine.base import Engine

_LOG = logging.getLogger(__name__)


class EngineStates:
    """The engines and their states; what is done with them is the ``EnginePool``'s."""

    def __init__(
        self, engines: Sequence[Engine], config: RolloutConfig, version: int | None
    ) -> None:
        """Take the engines; nothing is sent.

        Args:
            engines: At least one.
            config: What is needed of them, and time limits.
            version: Weights version that an engine must hold to be used; none while there is none.
        """
        self.engines = tuple(PooledEngine(engine) for engine in engines)
        self._version = version
        self._config = config
        self._monitor = Monitor(config, self)
        self.memory_is_away = False
        """Whether the engines have given their memory to the trainer (``colocated``)."""
        self._needs = Needs(config.temperature, config.weight_sync.in_flight)
        self._refusal: RolloutError | None = None
        self._news = asyncio.Event()

    async def close(self) -> None:
        """End the monitor, and close every connection."""
        await self._monitor.close()
        for pooled in self.engines:
            await pooled.engine.close()

    @property
    def version(self) -> int | None:
        """Weights version that an engine must hold to be used; setting it leaves others stale."""
        return self._version

    @version.setter
    def version(self, version: int | None) -> None:
        self._version = version
        for pooled in self.engines:
            if pooled.is_usable and pooled.version != str(version):
                self._move(pooled, EngineState.STALE, f"it has weights version {pooled.version}")

    @property
    def needs_weights(self) -> bool:
        """Whether no engine is usable, but one would be with the pool's weights."""
        states = {pooled.state for pooled in self.engines}
        return EngineState.USABLE not in states and EngineState.STALE in states

    def start_monitor(self) -> None:
        """Watch the engines; the other methods do it by themselves."""
        self._monitor.start(self.engines)

    async def wait_for_engines(self, probe_prompts: Sequence[Sequence[int]] = ()) -> None:
        """Wait until every engine has answered, for ``rollout.health.patience_s`` at most.

        Args:
            probe_prompts: See ``Needs``.

        Raises:
            RolloutError: One never did, or cannot be used as it is.
        """
        self._needs = replace(self._needs, probe_prompts=probe_prompts)
        self.start_monitor()
        async with self._patience("no answer", [EngineState.STARTING]):
            while any(pooled.state is EngineState.STARTING for pooled in self.engines):
                self._raise_refusal()
                await self._news.wait()
        self._raise_refusal()

    async def wait_usable(self, is_over: Callable[[], bool]) -> list[PooledEngine]:
        """Wait until an engine is usable; returns all that are.

        Args:
            is_over: Whether nobody wants one any more, so that none is returned; it is asked again
                after ``wake``.

        Raises:
            RolloutError: One cannot be used as it is, or none answers for
                ``rollout.health.patience_s``.
        """
        while not is_over():
            self._raise_refusal()
            if usable := [pooled for pooled in self.engines if pooled.is_usable]:
                return usable
            if self.needs_weights:
                # They come when the trainer has made its step, however long that takes.
                await self._news.wait()
                continue
            async with self._patience("no usable server", tuple(EngineState)):
                while not (is_over() or any(pooled.is_answering for pooled in self.engines)):
                    self._raise_refusal()
                    await self._news.wait()
        return []

    def wake(self) -> None:
        """Have everything that waits for a change look again."""
        self._news.set()
        self._news = asyncio.Event()

    def mark_updated(self, pooled: PooledEngine, version: int) -> None:
        """An engine got ``version`` and reports it; nothing changes if it was lost meanwhile."""
        if pooled.is_lost:
            return
        pooled.version = str(version)
        is_current = version == self._version
        state = EngineState.USABLE if is_current else EngineState.STALE
        self._move(pooled, state, "" if is_current else f"it has weights version {version}")

    def mark_lost(self, pooled: PooledEngine, reason: str) -> None:
        """Take an engine out; its requests go on elsewhere."""
        if pooled.is_lost:
            return
        _LOG.warning("%s is taken out: %s", pooled.address, reason)
        pooled.version = None
        pooled.is_paused = False
        pooled.num_broken = 0
        self._move(pooled, EngineState.LOST, reason)
        pooled.engine.give_up(reason)

    async def admit(self, pooled: PooledEngine) -> None:
        """See ``health.HealthListener``."""
        capabilities = await pooled.engine.capabilities()
        pooled.num_ranks = capabilities.num_ranks
        method = self._config.weight_sync.method
        if method not in capabilities.methods:
            raise RolloutError(
                f"rollout.weight_sync.method: must be {' or '.join(sorted(capabilities.methods))} "
                f"for {pooled.address}, got {method}; set it"
            )
        if not self.memory_is_away:  # else it would crash; it was checked when it was started first
            await pooled.engine.check(self._needs)

    def on_answer(self, pooled: PooledEngine, reported: str) -> None:
        """See ``health.HealthListener``."""
        state, needed = pooled.state, str(self._version)
        was_new = state is EngineState.STARTING
        if state is EngineState.STALE or (not was_new and reported == pooled.version):
            return
        pooled.version = reported
        if was_new and reported == needed:
            self._move(pooled, EngineState.USABLE, "")
        elif state is EngineState.LOST:
            _LOG.warning("%s answers again and needs weights", pooled.address)
            self._move(pooled, EngineState.STALE, f"it needs weights again: {pooled.reason}")
        else:
            self._move(pooled, EngineState.STALE, f"it has weights version {reported}")

    def on_refusal(self, pooled: PooledEngine, error: RolloutError) -> None:
        """See ``health.HealthListener``."""
        if pooled.state is EngineState.STARTING:
            self._refusal = error
            self.wake()
        else:
            self.mark_lost(pooled, str(error))
            pooled.reason = str(error)

    def on_silence(self, pooled: PooledEngine, reason: str) -> None:
        """See ``health.HealthListener``."""
        self.mark_lost(pooled, reason)

    def _move(self, pooled: PooledEngine, state: EngineState, reason: str) -> None:
        pooled.state, pooled.reason = state, reason
        self.wake()

    def _raise_refusal(self) -> None:
        self._monitor.raise_failure()
        if self._refusal is not None:
            raise self._refusal

    @contextlib.asynccontextmanager
    async def _patience(self, what: str, blamed: Sequence[EngineState]) -> AsyncIterator[None]:
        """Bound what is done inside by ``rollout.health.patience_s``."""
        patience_s = self._config.health.patience_s
        try:
            async with asyncio.timeout(patience_s):
                yield
        except TimeoutError:
            raise RolloutError(
                f"{what} for {patience_s:g} s (rollout.health.patience_s): "
                f"{self.describe(blamed)}; start them again and continue with resume=true"
            ) from None

    def describe(self, states: Sequence[EngineState] = tuple(EngineState)) -> str:
        """The engines in these states, and why, for people."""
        return "; ".join(
            f"{pooled.address} ({pooled.state}): {pooled.reason}"
            for pooled in self.engines
            if pooled.state in states
        )
