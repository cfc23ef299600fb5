"""What changes about a run's servers while it runs: which there are, and whose memory they have.

``Membership`` lets servers join and leave as ``rollout.servers_file`` changes. ``ColocatedServers``
share the trainer's GPUs (``rollout.colocated``): they release their memory while it trains.
docs/rollout.md describes both.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from bapo_megatron.config.load import ConfigError
from bapo_megatron.engine.base import Backend, Engine, EngineServer, MemoryPart
from bapo_megatron.engine.pooled import PooledEngine
from bapo_megatron.engine.supervisor import ServerSupervisor
from bapo_megatron.errors import ServerError
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.weight_sync.receive import Pausable, WeightReceiver

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Membership:
    """Makes the pool's engines follow the backend's addresses."""

    backend: Backend
    pool: EnginePool
    weights: WeightReceiver
    interval_s: float
    """Time between two readings."""

    async def follow(self) -> None:
        """Read the addresses until cancelled; where they cannot be read, nothing changes.

        A change counts once it is read twice in a row: then nobody is writing the file.
        """
        before = settled = tuple[str, ...]()
        while True:
            await asyncio.sleep(self.interval_s)
            problem, wanted = "", tuple[str, ...]()
            try:
                wanted = tuple(await asyncio.to_thread(self.backend.addresses))
            except ConfigError as error:
                problem = str(error)
            reading = (problem, *wanted)
            if reading == before != settled:
                settled = reading
                if problem:
                    _LOG.warning("%s; the servers stay as they were", problem)
                else:
                    await self._change(wanted)
            before = reading

    async def _change(self, wanted: Sequence[str]) -> None:
        """Let engines join first: requests of those that leave may continue there."""
        present = {pooled.address: pooled for pooled in self.pool.states.engines}
        for address in wanted:
            if address not in present:
                _LOG.warning("%s is added to the servers", address)
                self.pool.states.add(await self.backend.connect(address))
        leaving = (pooled for address, pooled in present.items() if address not in wanted)
        await asyncio.gather(*map(self._take_away, leaving))

    async def _take_away(self, pooled: PooledEngine) -> None:
        """Remove a server between two weight syncs, once it has no requests."""
        await self.weights.wait_idle()
        await self.pool.take_away(pooled)
        await self.weights.forget(pooled)
        await self.pool.states.remove(pooled)
        _LOG.warning("%s has left the servers; it may be stopped", pooled.address)


@dataclass(eq=False)
class ColocatedServers:
    """Moves the memory of the trainer's GPUs between its own servers and training.

    One cycle, between two batches:

        batch complete → drain → release cache and weights → the trainer trains
        → take memory for weights → new weights → take memory for the cache

    Stands between ``WeightReceiver`` and ``generation``: ``pause`` comes before new weights,
    ``resume`` after them.
    """

    supervisor: ServerSupervisor
    pool: EnginePool
    generation: Pausable | None
    timeout_s: float
    _starts_at_release: dict[EngineServer, int] = field(default_factory=dict)
    """``num_starts`` of each server when it released its memory: only that process gets it back."""

    async def release(self) -> None:
        """Have every server release its memory, once a batch is complete.

        A server that ends meanwhile is started again only after ``pause``.

        Raises:
            RolloutError: A server is still busy; nothing was released there.
        """
        await self.supervisor.hold_restarts()
        await self.pool.drain()
        self.pool.states.memory_is_away = True
        servers = [server for server in self.supervisor.servers if server.is_started]
        self._starts_at_release = {server: server.num_starts for server in servers}
        await self._on_all(servers, lambda engine: engine.release_memory(self.timeout_s))

    async def pause(self) -> bool:
        """Pause generation and give the servers memory for new weights; see ``Pausable.pause``."""
        was_running = self.generation is not None and await self.generation.pause()
        await self._take(MemoryPart.WEIGHTS)
        self.supervisor.allow_restarts()
        return was_running

    async def resume(self) -> None:
        """Give the servers memory for their cache, and admit requests."""
        await self._take(MemoryPart.CACHE)
        self._starts_at_release.clear()
        self.pool.states.memory_is_away = False
        if self.generation is not None:
            await self.generation.resume()

    async def _take(self, part: MemoryPart) -> None:
        released = [
            server
            for server, num_starts in self._starts_at_release.items()
            if server.is_started and server.num_starts == num_starts
        ]
        await self._on_all(released, lambda engine: engine.take_memory(part, self.timeout_s))

    async def _on_all(
        self, servers: Iterable[EngineServer], act: Callable[[Engine], Awaitable[None]]
    ) -> None:
        """Act on each server's engine.

        A server that fails is killed and started again: nobody knows which memory it holds.
        """
        by_address = {pooled.address: pooled for pooled in self.pool.states.engines}
        pairs = [(server, by_address[server.address]) for server in servers]
        results = await asyncio.gather(
            *(act(pooled.engine) for _, pooled in pairs), return_exceptions=True
        )
        for (server, pooled), result in zip(pairs, results, strict=True):
            if isinstance(result, BaseException):
                self._starts_at_release.pop(server, None)
            if isinstance(result, ServerError):
                _LOG.warning("%s; it is killed (%s)", result, server.log_path)
                server.kill()
                self.pool.states.mark_lost(pooled, str(result))
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ServerError):
                raise result
