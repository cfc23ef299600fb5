"""Which servers of a run may be used.

A server is used only while it answers and holds the pool's weights version. One that dies, hangs or
answers nonsense is lost. When it answers again it needs weights first, whatever version it reports:
it may be another process.

    starting ──answers──▶ usable ◀──weights── stale ◀──answers── lost
        └──answers, other weights──────────────▲                  ▲
                                 usable, stale ────fails──────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from bapo_megatron.errors import RolloutError
from bapo_megatron.rollout.engine import Engine, EngineState
from bapo_megatron.rollout.health import Monitor
from bapo_megatron.engine.sglang.convention import check_temperature_convention
from bapo_megatron.engine.sglang.client import SglangClient
from bapo_megatron.engine.sglang.dialect import flushes_retracted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from bapo_megatron.config.rollout import RolloutConfig
    from bapo_megatron.engine.sglang.client import ApiKeys

_LOG = logging.getLogger(__name__)


class EngineStates:
    """The servers and their states; what is done with them is the ``EnginePool``'s."""

    def __init__(
        self,
        addresses: Sequence[str],
        keys: ApiKeys,
        config: RolloutConfig,
        version: int | None,
    ) -> None:
        """Prepare the clients; nothing is sent.

        Args:
            addresses: At least one ``http://host:port``.
            keys: Keys of all servers.
            config: Connections and time limits.
            version: Weights version that a server must hold to be used; none while there is none.
        """
        self.engines = tuple(
            Engine(
                SglangClient(
                    address,
                    keys,
                    request_timeout_s=config.request_timeout_s,
                )
            )
            for address in addresses
        )
        self._version = version
        self._config = config
        self._monitor = Monitor(config, self)
        self.memory_is_away = False
        """Whether the servers have given their memory to the trainer (``colocated``)."""
        self._temperature = 1.0
        self._probe_prompts: Sequence[Sequence[int]] = ()
        self._refusal: RolloutError | None = None
        self._news = asyncio.Event()

    async def close(self) -> None:
        """End the monitor, and close every connection."""
        await self._monitor.close()
        for engine in self.engines:
            await engine.client.close()

    @property
    def version(self) -> int | None:
        """Weights version that a server must hold to be used; setting it leaves others stale."""
        return self._version

    @version.setter
    def version(self, version: int | None) -> None:
        self._version = version
        for engine in self.engines:
            if engine.state is EngineState.USABLE and engine.version != str(version):
                self._move(engine, EngineState.STALE, f"it has weights version {engine.version}")

    @property
    def needs_weights(self) -> bool:
        """Whether no server is usable, but one would be with the pool's weights."""
        states = {engine.state for engine in self.engines}
        return EngineState.USABLE not in states and EngineState.STALE in states

    def start_monitor(self) -> None:
        """Watch the servers; the other methods do it by themselves."""
        self._monitor.start(self.engines)

    async def check(self, temperature: float, prompts: Sequence[Sequence[int]]) -> None:
        """``wait_for_servers``, and probe each server's temperature convention when it answers.

        Args:
            temperature: T of the run.
            prompts: Contexts whose next token is probed.

        Raises:
            RolloutError: As ``wait_for_servers``.
        """
        self._temperature, self._probe_prompts = temperature, prompts
        await self.wait_for_servers()

    async def wait_for_servers(self) -> None:
        """Wait until every server has answered, for ``rollout.health.patience_s`` at most.

        Raises:
            RolloutError: One never did, or cannot be used as it is.
        """
        self.start_monitor()
        async with self._patience("no answer", [EngineState.STARTING]):
            while any(engine.state is EngineState.STARTING for engine in self.engines):
                self._raise_refusal()
                await self._news.wait()
        self._raise_refusal()

    def mark_updated(self, engine: Engine, version: int) -> None:
        """A server has got ``version`` and reports it; nothing changes if it was lost meanwhile."""
        if engine.state is EngineState.LOST:
            return
        engine.version = str(version)
        is_current = version == self._version
        state = EngineState.USABLE if is_current else EngineState.STALE
        self._move(engine, state, "" if is_current else f"it has weights version {version}")

    def mark_lost(self, engine: Engine, reason: str) -> None:
        """Take a server out; its requests go on elsewhere."""
        if engine.state is EngineState.LOST:
            return
        _LOG.warning("%s is taken out: %s", engine.address, reason)
        engine.version = None
        engine.is_paused = False
        engine.num_broken = 0
        self._move(engine, EngineState.LOST, reason)
        engine.client.give_up(reason)

    async def admit(self, engine: Engine) -> None:
        """See ``health.HealthListener``."""
        info = await engine.client.info()
        in_flight = self._config.weight_sync.in_flight
        if in_flight == "retract" and not flushes_retracted(info.version):
            raise RolloutError(
                f"{engine.address}: SGLang {info.version} ends when it gets weights while requests "
                "are retracted; set rollout.weight_sync.in_flight: abort, or update it"
            )
        engine.num_ranks = info.num_ranks
        if self.memory_is_away:
            return  # it would crash; it is the run's own, and was probed when it was started first
        await engine.client.resume()  # a trainer that was killed during a pause left it so
        await check_temperature_convention(engine.client, self._temperature, self._probe_prompts)

    def on_answer(self, engine: Engine, reported: str) -> None:
        """See ``health.HealthListener``."""
        state, needed = engine.state, str(self._version)
        was_new = state is EngineState.STARTING
        if state is EngineState.STALE or (not was_new and reported == engine.version):
            return
        engine.version = reported
        if was_new and reported == needed:
            self._move(engine, EngineState.USABLE, "")
        elif state is EngineState.LOST:
            _LOG.warning("%s answers again and needs weights", engine.address)
            self._move(engine, EngineState.STALE, f"it needs weights again: {engine.reason}")
        else:
            self._move(engine, EngineState.STALE, f"it has weights version {reported}")

    def on_refusal(self, engine: Engine, error: RolloutError) -> None:
        """See ``health.HealthListener``."""
        if engine.state is EngineState.STARTING:
            self._refusal = error
            self._announce()
        else:
            self.mark_lost(engine, str(error))
            engine.reason = str(error)

    def on_silence(self, engine: Engine, reason: str) -> None:
        """See ``health.HealthListener``."""
        self.mark_lost(engine, reason)

    def _move(self, engine: Engine, state: EngineState, reason: str) -> None:
        engine.state, engine.reason = state, reason
        self._announce()

    def _announce(self) -> None:
        """Wake everything that waits for a change."""
        self._news.set()
        self._news = asyncio.Event()

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
        """The servers in these states, and why, for people."""
        return "; ".join(
            f"{engine.address} ({engine.state}): {engine.reason}"
            for engine in self.engines
            if engine.state in states
        )
