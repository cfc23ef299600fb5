"""Servers on the trainer's GPUs: they give their memory away while it trains (docs/rollout.md).

One cycle, between two batches:

    batch complete → drain → release cache and weights → the trainer trains
    → take memory for weights → new weights → take memory for the cache
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from bapo_megatron.engine.base import Engine, EngineServer, MemoryPart
from bapo_megatron.engine.supervisor import ServerSupervisor
from bapo_megatron.errors import ServerError
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.weight_sync.receive import Pausable

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class ColocatedServers:
    """The memory of the trainer's own servers.

    Stands between ``WeightReceiver`` and ``generation``: ``pause`` comes before new weights,
    ``resume`` after them.
    """

    supervisor: ServerSupervisor
    pool: EnginePool
    generation: Pausable | None
    timeout_s: float
    _starts_at_release: dict[EngineServer, int] = field(default_factory=dict)
    """How often each server had been started when it released its memory: only the same process
    gets it back."""

    async def release(self) -> None:
        """Have every server give its memory away, when a batch is complete.

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
        """Give the servers memory for their cache, and let requests in."""
        await self._take(MemoryPart.CACHE)
        self._starts_at_release.clear()
        self.pool.states.memory_is_away = False
        if self.generation is not None:
            await self.generation.resume()

    async def _take(self, part: MemoryPart) -> None:
        """Give memory back to the processes that have released it."""
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
        owned = [(server, by_address[server.address]) for server in servers]
        results = await asyncio.gather(
            *(act(pooled.engine) for _, pooled in owned), return_exceptions=True
        )
        for (server, pooled), result in zip(owned, results, strict=True):
            if isinstance(result, BaseException):
                self._starts_at_release.pop(server, None)
            if isinstance(result, ServerError):
                _LOG.warning("%s; it is killed (%s)", result, server.log_path)
                server.kill()
                self.pool.states.mark_lost(pooled, str(result))
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ServerError):
                raise result
