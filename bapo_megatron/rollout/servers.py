"""Changes of a run's servers during the run: their membership, and the memory that they hold.

``Membership`` lets servers join and leave as ``rollout.servers_file`` changes. ``ColocatedServers``
share the trainer's GPUs (``rollout.colocated``), so they release their memory during training.
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
    """Keeps the pool's engines in step with the backend's addresses."""

    backend: Backend
    pool: EnginePool
    weights: WeightReceiver
    interval_s: float
    """Time between two readings."""

    async def follow(self) -> None:
        """Poll the addresses until cancelled; if they cannot be read, nothing changes.

        A change counts once two reads agree, when nobody is writing the file any more.
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
                    _LOG.warning("%s; the servers stay unchanged", problem)
                else:
                    await self._change(wanted)
            before = reading

    async def _change(self, wanted: Sequence[str]) -> None:
        """Add engines, then remove others, whose requests may continue on the new ones."""
        present = {pooled.address: pooled for pooled in self.pool.states.engines}
        for address in wanted:
            if address not in present:
                _LOG.warning("%s was added to the servers", address)
                self.pool.states.add(await self.backend.connect(address))
        leaving = (pooled for address, pooled in present.items() if address not in wanted)
        await asyncio.gather(*map(self._remove, leaving))

    async def _remove(self, pooled: PooledEngine) -> None:
        """Remove a server between two weight syncs, once it has no requests."""
        await self.weights.wait_idle()
        await self.pool.drain_engine(pooled)
        await self.weights.forget(pooled)
        await self.pool.states.remove(pooled)
        _LOG.warning("%s was removed from the servers; it can be stopped", pooled.address)


@dataclass(eq=False)
class ColocatedServers:
    """Alternates the memory of the trainer's GPUs between its servers and training.

    One cycle, between two batches:

        batch complete → drain → release cache and weights → the trainer trains
        → restore memory for weights → new weights → restore memory for the cache

    Wraps ``generation`` for ``WeightReceiver``: ``pause`` comes before new weights, ``resume``
    after them.
    """

    supervisor: ServerSupervisor
    pool: EnginePool
    generation: Pausable
    timeout_s: float
    _starts_at_release: dict[EngineServer, int] = field(default_factory=dict)
    """``num_starts`` of each server when it released its memory; a later process never did."""

    async def release(self) -> None:
        """Have every server release its memory, once a batch is complete.

        A server that exits meanwhile is restarted only after ``pause``.

        Raises:
            RolloutError: A server is still busy; nothing was released there.
        """
        await self.supervisor.hold_restarts()
        await self.pool.drain()
        self.pool.states.memory_is_released = True
        servers = [server for server in self.supervisor.servers if server.is_started]
        self._starts_at_release = {server: server.num_starts for server in servers}
        await self._on_all(servers, lambda engine: engine.release_memory(self.timeout_s))

    async def pause(self) -> bool:
        """Pause generation and restore memory for new weights; see ``Pausable.pause``."""
        was_running = await self.generation.pause()
        await self._restore_memory(MemoryPart.WEIGHTS)
        self.supervisor.allow_restarts()
        return was_running

    async def resume(self) -> None:
        """Restore memory for the KV cache, and admit requests."""
        await self._restore_memory(MemoryPart.CACHE)
        self._starts_at_release.clear()
        self.pool.states.memory_is_released = False
        await self.generation.resume()

    async def _restore_memory(self, part: MemoryPart) -> None:
        released = [
            server
            for server, num_starts in self._starts_at_release.items()
            if server.is_started and server.num_starts == num_starts
        ]
        await self._on_all(released, lambda engine: engine.take_memory(part, self.timeout_s))

    async def _on_all(
        self, servers: Iterable[EngineServer], act: Callable[[Engine], Awaitable[None]]
    ) -> None:
        """Call ``act`` on each server's engine.

        A server that fails is killed and restarted: the memory that it holds is unknown.
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
                _LOG.warning("%s; killing it (%s)", result, server.log_path)
                server.kill()
                self.pool.states.mark_lost(pooled, str(result))
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ServerError):
                raise result
