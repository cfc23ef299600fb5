"""Servers on the trainer's GPUs: they give their memory away while it trains (docs/rollout.md).

One cycle, between two batches:

    batch complete → drain → /pause_generation → idle? → /release_memory_occupation (cache, weights)
    → the trainer trains
    → /resume_memory_occupation (weights) → new weights → resume (cache) → /continue_generation

What SGLang 0.5.20 and 0.5.21 make of it:

* A server that is not idle crashes in release, on an assertion. ``/pause_generation`` in its mode
  ``abort`` answers requests, also those of other clients, with what there is, and lets no new one
  in; it does not wait until the scheduler is idle. ``/flush_cache?timeout=…`` does, and fails if
  the scheduler is not idle by then.
* A second resume of the same memory crashes it, and so does one of memory that was never released,
  as that of a server which restarted meanwhile.
* The content of released weights is lost, therefore nothing may be generated before new ones.
* While paused it answers no /generate at all, and 503 to /ready; control calls work.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import httpx

from bapo_megatron.errors import RolloutError
from bapo_megatron.engine.sglang.http import describe_cause

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any

    from bapo_megatron.rollout.engine_pool import EnginePool
    from bapo_megatron.engine.sglang.server import SglangServer
    from bapo_megatron.engine.supervisor import ServerSupervisor
    from bapo_megatron.weight_sync.servers import Pausable

_LOG = logging.getLogger(__name__)
_WEIGHTS, _CACHE = "weights", "kv_cache"
_LONGEST_IDLE_WAIT_S = 30.0


class _GoneError(Exception):
    """A server did not answer, or with an error."""


class ColocatedServers:
    """The memory of the trainer's own servers.

    It stands between ``WeightReceiver`` and what generates: ``pause`` comes before new weights,
    ``resume`` after them.
    """

    def __init__(
        self,
        supervisor: ServerSupervisor,
        pool: EnginePool,
        generation: Pausable | None,
        timeout_s: float,
    ) -> None:
        """Put the parts together; nothing is sent.

        Args:
            supervisor: Owns the servers.
            pool: Uses them.
            generation: Is paused and resumed with them.
            timeout_s: Longest time of one call.
        """
        self._supervisor = supervisor
        self._pool = pool
        self._generation = generation
        self._timeout_s = timeout_s
        self._idle_wait_s = min(_LONGEST_IDLE_WAIT_S, timeout_s / 2)
        # How often each server had been started when it released its memory: it has to be given
        # back to the same process only.
        self._starts_at_release: dict[SglangServer, int] = {}

    async def release(self) -> None:
        """Have every server give its memory away; call it when a batch is complete.

        A server that ends meanwhile is started again only after ``pause``.

        Raises:
            RolloutError: A server is still busy; nothing was released there.
        """
        await self._supervisor.hold_restarts()
        await self._pool.drain()
        self._pool.memory_is_away = True
        servers = [s for s in self._supervisor.servers if s.is_started]
        await self._on_all(servers, self._release)

    async def pause(self) -> bool:
        """Before new weights: pause generation and give the servers memory for their weights.

        Returns:
            Whether generation was running.
        """
        was_running = self._generation is not None and await self._generation.pause()
        await self._on_all(self._released(), self._resume_weights)
        self._supervisor.allow_restarts()
        return was_running

    async def resume(self) -> None:
        """After new weights: give the servers memory for their cache, and let requests in."""
        await self._on_all(self._released(), self._resume_cache)
        self._starts_at_release.clear()
        self._pool.memory_is_away = False
        if self._generation is not None:
            await self._generation.resume()

    def _released(self) -> list[SglangServer]:
        """Servers whose process has released memory."""
        return [
            server
            for server, num_starts in self._starts_at_release.items()
            if server.is_started and server.num_starts == num_starts
        ]

    async def _release(self, server: SglangServer) -> None:
        await self._call(server, "/pause_generation", {"mode": "abort"})
        is_idle = await self._post(server, "/flush_cache", {}, {"timeout": self._idle_wait_s})
        if not is_idle.is_success:
            raise RolloutError(
                f"{server.address}: is still busy {self._idle_wait_s:g} s after its requests were "
                f"aborted ({is_idle.text.strip()}); its memory is not released, which would crash "
                f"it. See {server.log_path}, and continue with resume=true"
            )
        await self._call(server, "/release_memory_occupation", {"tags": [_CACHE, _WEIGHTS]})
        self._starts_at_release[server] = server.num_starts

    async def _resume_weights(self, server: SglangServer) -> None:
        await self._call(server, "/resume_memory_occupation", {"tags": [_WEIGHTS]})

    async def _resume_cache(self, server: SglangServer) -> None:
        await self._call(server, "/resume_memory_occupation", {"tags": [_CACHE]})
        await self._call(server, "/continue_generation", {})

    async def _on_all(
        self, servers: list[SglangServer], act: Callable[[SglangServer], Awaitable[None]]
    ) -> None:
        """Act on each server; one that fails is killed, so that it is started again.

        Nobody knows which memory it holds.
        """
        results = await asyncio.gather(*map(act, servers), return_exceptions=True)
        for server, result in zip(servers, results, strict=True):
            if not isinstance(result, _GoneError):
                continue
            _LOG.warning("%s; it is killed (%s)", result, server.log_path)
            self._starts_at_release.pop(server, None)
            server.kill()
            for engine in self._pool.engines:
                if engine.address == server.address:
                    self._pool.mark_lost(engine, str(result))
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, _GoneError):
                raise result

    async def _call(self, server: SglangServer, path: str, body: dict[str, Any]) -> None:
        reply = await self._post(server, path, body)
        if not reply.is_success:
            raise _GoneError(f"{server.address}{path}: HTTP {reply.status_code}: {reply.text}")

    async def _post(
        self,
        server: SglangServer,
        path: str,
        body: dict[str, Any],
        query: dict[str, Any] | None = None,
    ) -> httpx.Response:
        """Send a call once: a repeated one would crash the server."""
        async with httpx.AsyncClient(trust_env=False, timeout=self._timeout_s) as client:
            try:
                return await client.post(
                    f"{server.address}{path}",
                    json=body,
                    params=query,
                    headers=server.keys.headers(admin=True),
                )
            except httpx.TransportError as error:
                reason = describe_cause(error)
                raise _GoneError(f"{server.address}{path}: no answer ({reason})") from error
