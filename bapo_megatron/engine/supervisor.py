"""Keeps the engine servers of this host running: starts, watches, restarts and ends them."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.engine.base import EngineServer, Readiness
from bapo_megatron.errors import RolloutError
from bapo_megatron.runtime.processes import tail

_LOG = logging.getLogger(__name__)
_POLL_S = 0.2
_ASK_INTERVAL_S = 1.0


@dataclass
class _Supervised:
    server: EngineServer
    is_ready: bool = False
    was_ready: bool = False
    """Since any start."""
    num_failures: int = 0
    """Exits in a row without being ready for long in between."""
    last_failure: str = ""
    """How it last ended, with the end of its log, read before a restart writes to it."""


class ServerSupervisor:
    """Runs the servers of one process; belongs to its event loop."""

    def __init__(
        self, servers: Sequence[EngineServer], config: RolloutConfig, min_ready: int | None = None
    ) -> None:
        """Prepare; ``min_ready`` servers (None: all) must become ready at first."""
        self.servers = servers
        """Their addresses are known after ``start``."""
        self._config = config.server
        self._min_ready = min_ready or len(servers)
        self._stuck_s = config.health.stuck_timeout_s
        self._supervised = [_Supervised(server) for server in servers]
        self._tasks: list[asyncio.Task[None]] = []
        self._may_restart = asyncio.Event()
        self._may_restart.set()
        self._started_s = 0.0

    def start(self) -> None:
        """Start every server and return at once.

        Raises:
            RolloutError: A port is in use; ``close`` ends what was started.
        """
        assert not self._tasks, "servers are started once"
        self._started_s = time.monotonic()
        for server in self.servers:
            server.start()
        self._tasks = [asyncio.create_task(self._supervise(entry)) for entry in self._supervised]

    async def wait_ready(self, report: Callable[[str], None]) -> None:
        """Wait until enough servers take requests; ``report`` gets progress lines.

        Raises:
            RolloutError: Too many died before they were ever ready, or took longer than
                ``rollout.server.start_timeout_s``.
        """
        while (num_ready := sum(entry.is_ready for entry in self._supervised)) < self._min_ready:
            for task in self._tasks:
                if task.done():
                    task.result()
            waited_s = time.monotonic() - self._started_s
            report(f"starting servers: {num_ready} of {len(self.servers)} ready, {waited_s:.0f} s")
            await asyncio.sleep(_POLL_S)

    async def watch(self) -> None:
        """Raise a ``RolloutError`` once too many servers exit before they were ever ready."""
        await asyncio.gather(*self._tasks)

    def describe_failures(self) -> str:
        """Describe servers that failed and are not ready, with the end of their logs."""
        return "\n".join(
            entry.last_failure
            for entry in self._supervised
            if entry.num_failures and not entry.is_ready
        )

    async def hold_restarts(self) -> None:
        """Restart no server until ``allow_restarts``; return once none is starting."""
        self._may_restart.clear()
        while any(entry.server.is_started and not entry.is_ready for entry in self._supervised):
            await asyncio.sleep(_POLL_S)

    def allow_restarts(self) -> None:
        """Restart the servers that exited meanwhile."""
        self._may_restart.set()

    async def close(self) -> None:
        """Stop every server and wait for it; safe to call twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(asyncio.to_thread(server.close) for server in self.servers))

    async def _supervise(self, entry: _Supervised) -> None:
        """Restart a server whenever it ends; raise if too few can become ready at first."""
        server = entry.server
        while True:
            end = f"{server.name} {await self._run_once(entry)}"
            entry.num_failures += 1
            entry.last_failure = (
                f"{end}; the last lines of {server.log_path} say why:\n{tail(server.log_path)}"
            )
            self._raise_failed_start()
            wait_s = restart_wait_s(entry.num_failures, self._config.max_restart_wait_s)
            delay = f" in {wait_s:g} s" if wait_s else ""
            _LOG.warning("%s; restarting%s (%s)", end, delay, server.log_path)
            # In a thread, because it waits for a process group to end.
            await asyncio.to_thread(server.close)
            await asyncio.sleep(wait_s)
            await self._may_restart.wait()

    def _raise_failed_start(self) -> None:
        """Raise if too few servers were ever ready or may still become so."""
        failed = [entry for entry in self._supervised if entry.num_failures and not entry.was_ready]
        if len(self.servers) - len(failed) < self._min_ready:
            raise RolloutError("\n".join(entry.last_failure for entry in failed))

    async def _run_once(self, entry: _Supervised) -> str:
        """Start a server unless it runs, and poll it; return how it ended."""
        server, start_timeout_s = entry.server, self._config.start_timeout_s
        if not server.is_started:
            try:
                server.start()
            except (RolloutError, OSError) as error:  # such as a port that was taken, or no memory
                return f"was not started ({error})"
        deadline_s, ready_since_s = time.monotonic() + start_timeout_s, math.inf
        try:
            while True:
                # At least ``_POLL_S``: no server is blamed if this process itself was stopped.
                readiness = await server.ask(max(deadline_s - time.monotonic(), _POLL_S))
                now_s = time.monotonic()
                if readiness is Readiness.READY and not entry.is_ready:
                    _LOG.info("%s is ready", server.name)
                    entry.is_ready, entry.was_ready, ready_since_s = True, True, now_s
                if (reason := server.exit_reason()) is not None:
                    return f"died ({reason})"
                if entry.is_ready and readiness is not Readiness.SILENT:
                    deadline_s = now_s + self._stuck_s
                elif now_s >= deadline_s and entry.is_ready:
                    return f"did not answer for {self._stuck_s:g} s (health.stuck_timeout_s)"
                elif now_s >= deadline_s:
                    return (
                        f"did not answer within {start_timeout_s:g} s; raise "
                        "rollout.server.start_timeout_s, or look for what it waits for"
                    )
                interval_s = min(_ASK_INTERVAL_S, self._stuck_s / 4)
                await asyncio.sleep(interval_s if entry.is_ready else _POLL_S)
        finally:
            entry.is_ready = False
            if time.monotonic() - ready_since_s > self._config.max_restart_wait_s:
                entry.num_failures = 0


def restart_wait_s(num_failures: int, max_s: float) -> float:
    """Return 0, 1, 2, 4, … seconds after the first, second, third, … failure in a row."""
    return min(2 ** (num_failures - 2), max_s) if num_failures > 1 else 0.0
