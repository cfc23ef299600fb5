"""Keeps the engine servers of this host running: starts, watches, restarts and ends them."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.engine.base import EngineServer, Readiness
from bapo_megatron.errors import RolloutError
from bapo_megatron.runtime.processes import tail

_LOG = logging.getLogger(__name__)
_POLL_S = 0.2
_ASK_INTERVAL_S = 2.0
_MAX_ASK_S = 5.0
_MAX_DOUBLINGS = 30


@dataclass
class _Supervised:
    """A server and its state."""

    server: EngineServer
    is_ready: bool = False
    was_ready: bool = False
    """Ever."""
    num_failures: int = 0
    """How often it ended in a row without having been ready for long."""
    last_end: str = ""

    def failure(self) -> str:
        """Say how it ended, with the last lines of its log."""
        server = self.server
        times = f", {self.num_failures} times in a row" if self.num_failures > 1 else ""
        return (
            f"{server.name} {self.last_end}{times}; the last lines of {server.log_path} say why:\n"
            f"{tail(server.log_path)}"
        )


class ServerSupervisor:
    """The servers that one process owns; belongs to its event loop."""

    def __init__(
        self, servers: Sequence[EngineServer], config: RolloutConfig, min_ready: int | None = None
    ) -> None:
        """Take at least one server; none of them was started yet.

        ``min_ready``: how many must get ready at first (``rollout.min_servers``); none means all.
        """
        self.servers = servers
        """Their addresses are known after ``start``."""
        self._config = config.server
        self._min_ready = min_ready or len(servers)
        self._stuck_s = config.health.stuck_timeout_s
        self._ask_timeout_s = min(config.health.timeout_s, _MAX_ASK_S)
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
        self._tasks = [asyncio.create_task(self._supervise(each)) for each in self._supervised]

    async def wait_ready(self, report: Callable[[str], None]) -> None:
        """Wait until enough servers take requests; ``report`` gets lines for people meanwhile.

        Raises:
            RolloutError: Too many died before they were ever ready, or took longer than
                ``rollout.server.start_timeout_s``.
        """
        while sum(each.is_ready for each in self._supervised) < self._min_ready:
            for task in self._tasks:
                if task.done():
                    task.result()
            waited_s = time.monotonic() - self._started_s
            if len(self.servers) == 1:
                report(f"starting {self.servers[0].name}: {waited_s:.0f} s")
            else:
                num_ready = sum(each.is_ready for each in self._supervised)
                report(f"starting {len(self.servers)} servers: {num_ready} ready, {waited_s:.0f} s")
            await asyncio.sleep(_POLL_S)

    async def watch(self) -> None:
        """Wait until too many end before they were ever ready; raise the ``RolloutError``."""
        await asyncio.gather(*self._tasks)

    def describe_failures(self) -> str:
        """Say why restarted servers are not ready, with the end of their logs; '' if all are."""
        return "\n".join(
            each.failure() for each in self._supervised if each.num_failures and not each.is_ready
        )

    async def hold_restarts(self) -> None:
        """Restart no server until ``allow_restarts``: somebody else uses the GPUs.

        Returns when none is just starting.
        """
        self._may_restart.clear()
        while any(each.server.is_started and not each.is_ready for each in self._supervised):
            await asyncio.sleep(_POLL_S)

    def allow_restarts(self) -> None:
        """Restart the servers that ended meanwhile."""
        self._may_restart.set()

    async def close(self) -> None:
        """End every server and wait for it; safe to call twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(asyncio.to_thread(server.close) for server in self.servers))

    async def _supervise(self, supervised: _Supervised) -> None:
        """Restart a server whenever it has ended.

        Raises:
            RolloutError: Fewer than must get ready at first are left that may.
        """
        server, max_wait_s = supervised.server, self._config.max_restart_wait_s
        while True:
            supervised.last_end = await self._live(supervised)
            supervised.num_failures += 1
            self._raise_failed_start()
            wait_s = restart_wait_s(supervised.num_failures, max_wait_s)
            after = f" in {wait_s:g} s" if wait_s else ""
            event = f"{server.name} {supervised.last_end}; it is started again{after}"
            _LOG.warning("%s (%s)", event, server.log_path)
            # In a thread, because it waits for the end of a process group.
            await asyncio.to_thread(server.close)
            await asyncio.sleep(wait_s)
            await self._may_restart.wait()

    def _raise_failed_start(self) -> None:
        """Raise if too few servers are left that have been ready or may still become so."""
        failed = [each for each in self._supervised if each.num_failures and not each.was_ready]
        num_spare = len(self.servers) - self._min_ready
        if len(failed) > num_spare:
            lines = [each.failure() for each in failed]
            if num_spare:
                lines.insert(
                    0,
                    f"rollout.min_servers: {self._min_ready} of {len(self.servers)} servers must "
                    f"get ready, but {len(failed)} ended; lower it, or see why:",
                )
            raise RolloutError("\n".join(lines))

    async def _live(self, supervised: _Supervised) -> str:
        """Start a server if it does not run, and follow it; return how it ended."""
        server, limit_s = supervised.server, self._config.start_timeout_s
        if not server.is_started:
            try:
                server.start()
            except (RolloutError, OSError) as error:  # somebody took the port, no memory
                return f"was not started ({error})"
        deadline_s = time.monotonic() + limit_s
        while await server.ask(self._ask_timeout_s) is not Readiness.READY:
            if (reason := server.exit_reason()) is not None:
                return f"died ({reason})"
            if time.monotonic() > deadline_s:
                return (
                    f"did not answer within {limit_s:g} s; raise rollout.server.start_timeout_s, "
                    "or look for what it waits for"
                )
            await asyncio.sleep(_POLL_S)
        _LOG.info("%s is ready", server.name)
        ready_since_s = time.monotonic()
        supervised.is_ready = supervised.was_ready = True
        end = await self._follow(server)
        supervised.is_ready = False
        if time.monotonic() - ready_since_s > self._config.max_restart_wait_s:
            supervised.num_failures = 0
        return end

    async def _follow(self, server: EngineServer) -> str:
        """Watch a server that takes requests; return how it ended."""
        silence = asyncio.create_task(self._await_silence(server))
        try:
            while (reason := server.exit_reason()) is None:
                if silence.done():
                    silence.result()
                    return f"gave no answer for {self._stuck_s:g} s (health.stuck_timeout_s)"
                await asyncio.sleep(_POLL_S)
        finally:
            silence.cancel()
        return f"died ({reason})"

    async def _await_silence(self, server: EngineServer) -> None:
        """Return when the server's scheduler has answered nothing for too long.

        It gets one question at a time, because it will answer all of them if it goes on.
        """
        answered_s = time.monotonic()
        while True:
            # At least a moment, so that no server is blamed where this process itself stood still.
            limit_s = max(answered_s + self._stuck_s - time.monotonic(), _POLL_S)
            if await server.ask(limit_s) is not Readiness.SILENT:
                answered_s = time.monotonic()
            elif time.monotonic() - answered_s >= self._stuck_s:
                return
            await asyncio.sleep(min(_ASK_INTERVAL_S, self._stuck_s / 4))


def restart_wait_s(num_failures: int, max_s: float) -> float:
    """Return 0, 1, 2, 4, … seconds after the first, second, third, … failure in a row."""
    return min(2.0 ** min(num_failures - 2, _MAX_DOUBLINGS), max_s) if num_failures > 1 else 0.0
