"""Runs the agents of ``rollout.agent``: functions in worker processes, or commands.

Outside a sandbox one worker runs all commands. In sandboxes each command has a worker of its own,
which reaches the proxy through its socket, bound into the sandbox, and nothing else. With
``agent_limits.isolation: episode`` every episode has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import resource
import secrets
import shutil
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bapo_megatron.agent.proxy import Proxy
from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.config.sandbox import MAX_PROCESSES, SandboxConfig
from bapo_megatron.data.record import call_rewards
from bapo_megatron.environment.base import EnvironmentFailedError
from bapo_megatron.environment.handler import check_state
from bapo_megatron.errors import RolloutError
from bapo_megatron.runtime.processes import kill_marked
from bapo_megatron.runtime.workers import read_message
from bapo_megatron.sandbox.base import SandboxError
from bapo_megatron.sandbox.bubblewrap import BubblewrapSandbox

_MARK = "BAPO_MEGATRON_AGENT"
_TEXT = Path(__file__).with_name("worker.py").read_text(encoding="utf-8")
_START_TIMEOUT_S = 120.0
"""Time limit of a worker's start, imports included."""
_MAX_REPLY_BYTES = 16 << 20
_MAX_FILES = 1 << 14
"""A call takes three descriptors of a worker in a sandbox: the client's and both of a forward."""
_MORE_THREADS = 64
"""Threads and processes of a function's worker beside those of its episodes."""
_EXIT_S = 2.0
_LOG = logging.getLogger(__name__)


def _without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which clients reach the loopback, whatever ``http_proxy`` says."""
    names = ("no_proxy", "NO_PROXY")
    known = dict.fromkeys(environment[name] for name in names if environment.get(name))
    hosts = "*" if "*" in known else ",".join([*known, "127.0.0.1", "localhost"])
    return dict.fromkeys(names, hosts)


OnWait = Callable[[bool], None]
"""Learns at once that an agent must wait for others (True), and that it starts (False)."""


class AgentLostError(EnvironmentFailedError):
    """The worker of an agent ended, or its command was killed."""


class _GoneError(Exception):
    """The same, inside."""


class _Host:
    """A worker process, and the episodes in it."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        write: Callable[[bytes], None],
        end: Callable[[], Awaitable[None]],
    ) -> None:
        self._reader = reader
        self._write = write
        self._end = end
        self._secret = secrets.token_hex(16)
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading: asyncio.Task[None] | None = None

    @property
    def num_running(self) -> int:
        return len(self._replies)

    @property
    def is_gone(self) -> bool:
        return self._reading is not None and self._reading.done()

    async def start(self, options: Mapping[str, Any]) -> str:
        """Send the options; return what is wrong, if anything."""
        self._send({**options, "secret": self._secret})
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                message = await self._receive()
        except TimeoutError:
            return f"its process was not ready within {_START_TIMEOUT_S:g} s"
        if message is None:
            return "its process ended before it was ready; see what it printed"
        self._reading = asyncio.create_task(self._read())
        return str(message.get("error", ""))

    async def play(self, task: Mapping[str, Any], key: str) -> dict[str, Any]:
        """Run an agent; return its reply. Cancelling this ends the agent."""
        if self.is_gone:
            raise _GoneError
        number = next(self._numbers)
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        self._send({"id": number, "task": task, "key": key})
        try:
            return await reply
        finally:
            if not reply.done() or reply.cancelled():
                self._send({"cancel": number})
            del self._replies[number]

    async def close(self) -> None:
        await self._end()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        while (message := await self._receive()) is not None:
            reply = self._replies.get(message["id"])
            if reply is not None and not reply.done():
                reply.set_result(message)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(_GoneError())

    async def _receive(self) -> dict[str, Any] | None:
        """Return the next reply; None at the end, or if something else wrote to the pipe."""
        message = await read_message(self._reader) or {}
        return message if message.pop("secret", "") == self._secret else None

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # it has ended, which the reader notices
            self._write(json.dumps(message).encode() + b"\n")


class _Places:
    """Places for so many agents at a time; further ones wait in order."""

    def __init__(self, num_free: int) -> None:
        self._num_free = num_free
        self._queue: deque[tuple[asyncio.Future[None], OnWait]] = deque()

    async def enter(self, on_wait: OnWait) -> None:
        if self._num_free and not self._queue:
            self._num_free -= 1
            on_wait(False)
            return
        on_wait(True)
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((turn, on_wait))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        """Let the next agent in at once, so that no one sees it wait for nothing."""
        while self._queue:
            turn, on_wait = self._queue.popleft()
            if not turn.done():
                on_wait(False)
                turn.set_result(None)
                return
        self._num_free += 1


class AgentRunner:
    """Runs agents, as many at a time as ``agent_limits`` allows."""

    def __init__(self, config: RolloutConfig, proxy: Proxy) -> None:
        """Set up; nothing is started before ``open``."""
        assert config.agent is not None, "single-turn runs have no agents"
        self._config = config
        self._proxy = proxy
        self._label = f"rollout.agent: '{config.environment_name}'"
        limits = config.agent_limits
        self._is_private = limits.isolation == "episode" or bool(
            config.agent_command and config.agent_sandbox
        )
        """Whether each episode has a worker of its own."""
        self._private_places = self._shared_places = _Places(limits.commands)
        """For episodes with a worker of their own, and for the others; the same for commands."""
        if not config.agent_command:
            self._shared_places = _Places(limits.episodes * limits.workers)
        self._num_workers = 1 if config.agent_command else limits.workers
        self._hosts: set[_Host] = set()
        """Workers that were not closed."""
        self._shared: list[_Host] = []
        """Those of them that run any episode, the oldest first."""
        self._starting = asyncio.Lock()
        self._sandbox: BubblewrapSandbox | None = None
        self._thread = ThreadPoolExecutor(1)  # sandboxes end with the thread that starts them
        self._path = [str(Path.cwd()), *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
        self._mark = secrets.token_hex(8)
        self._numbers = itertools.count()

    async def open(self) -> None:
        """Start a worker, so that an unusable agent or sandbox fails now.

        Raises:
            RolloutError: It cannot be loaded, or there is no sandbox.
        """
        config, command = self._config, self._config.agent_command
        if config.agent_sandbox is not None:
            places = [str(self._proxy.socket_path.parent), *self._path]
            known = map(str, config.agent_sandbox.read_only)
            read_only = tuple(map(Path, dict.fromkeys([*known, *places])))
            changes: dict[str, Any] = {"read_only": read_only}
            if not (command or self._is_private):  # an episode that blocks takes a thread
                needed = min(config.agent_limits.episodes + _MORE_THREADS, MAX_PROCESSES)
                changes["processes"] = max(config.agent_sandbox.processes, needed)
            settings = SandboxConfig(**{**dict(config.agent_sandbox), **changes})
            try:
                self._sandbox = BubblewrapSandbox(settings, allows_loopback=True)
            except SandboxError as error:
                raise self._error(f"needs a sandbox: {error}") from error
        elif command and shutil.which(command[0]) is None:
            raise self._error(
                f"no such program '{command[0]}', and not package.module:function; correct it"
            )
        if config.agent_sandbox is None:
            _LOG.warning(
                "%s runs as you (agent_sandbox=null): programs of the policy that it starts could "
                "read your files and change this run, unless it runs them in a sandbox "
                "(docs/security.md)",
                self._label,
            )
        if self._is_private:
            await self._close(await self._start())
        else:
            await self._host()

    async def run(
        self, task: Mapping[str, Any], key: str, on_wait: OnWait, *, is_alone: bool = False
    ) -> Any:
        """Run an agent to its end; return its JSON value. Cancelling this ends the agent.

        ``is_alone``: in a worker without other episodes, so that its end is this one's doing.

        Raises:
            EnvironmentFailedError: The agent failed.
            AgentLostError: It was killed, or its worker ended, perhaps for another's reason.
        """
        place = f"prompt '{task['prompt_id']}'"
        is_private = is_alone or self._is_private
        places = self._private_places if is_private else self._shared_places
        await places.enter(on_wait)
        try:
            reply = await self._play(task, key, is_private=is_private)
        except _GoneError as error:
            raise self._lost(f"ended its process ({place})") from error
        finally:
            places.leave()
        if "is_killed" in reply:
            raise self._lost(f"was killed: {reply['error']} ({place})")
        if "error" in reply:
            raise self._failed(f"failed: {reply['error']} ({place})")
        try:
            check_state(reply["result"])
            call_rewards(reply["result"])
        except ValueError as error:
            raise self._failed(f"returned what cannot be kept: {error} ({place})") from error
        return reply["result"]

    async def close(self) -> None:
        """End every agent. Safe to call twice."""
        await asyncio.gather(*map(self._close, list(self._hosts)))
        self._thread.shutdown()
        if self._sandbox is not None:
            self._sandbox.close()
        await asyncio.to_thread(kill_marked, _MARK, self._mark)

    async def _play(self, task: Mapping[str, Any], key: str, *, is_private: bool) -> dict[str, Any]:
        if not is_private:
            return await (await self._host()).play(task, key)
        host = await self._start()
        try:
            return await host.play(task, key)
        finally:
            await self._close(host)

    async def _host(self) -> _Host:
        """Return a shared worker: a new one, or the one with the fewest agents."""
        async with self._starting:
            for host in [host for host in self._shared if host.is_gone]:
                self._shared.remove(host)
                await self._close(host)
            if len(self._shared) < self._num_workers:
                self._shared.append(await self._start())
                return self._shared[-1]
        return min(self._shared, key=lambda host: host.num_running)

    async def _start(self) -> _Host:
        config = self._config
        options: dict[str, Any] = {"path": self._path}
        if config.agent_command:
            options["command"] = config.agent_command
        else:
            options["function"] = config.agent
        if self._sandbox is not None:
            host = await self._sandboxed(self._sandbox)
            options["socket"] = str(self._proxy.socket_path)
        else:
            mark = f"{self._mark}{next(self._numbers)}."  # a worker ends what has its mark
            host = await self._unconfined(mark)
            options |= {"base_url": self._proxy.base_url, "parent": os.getpid(), "mark": mark}
        self._hosts.add(host)
        try:
            if problem := await host.start(options):
                key, python = "rollout.agent_python", config.agent_python or sys.executable
                if config.agent_sandbox is not None:
                    key, python = "rollout.agent_sandbox.python", config.agent_sandbox.python
                raise self._error(
                    f"cannot be started by {python}: {problem}; correct it, or set {key} to an "
                    "interpreter that has its packages"
                )
        except BaseException:
            await self._close(host)
            raise
        return host

    async def _unconfined(self, mark: str) -> _Host:
        process = await asyncio.create_subprocess_exec(
            *(str(self._config.agent_python or sys.executable), "-c", _TEXT),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_REPLY_BYTES,
            env={**os.environ, **_without_proxy(os.environ), _MARK: mark},
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        stdin = process.stdin

        async def end() -> None:
            stdin.close()
            try:
                async with asyncio.timeout(_EXIT_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

        return _Host(process.stdout, stdin.write, end)

    async def _sandboxed(self, sandbox: BubblewrapSandbox) -> _Host:
        loop = asyncio.get_running_loop()
        max_files = min(_MAX_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        starting = loop.run_in_executor(self._thread, sandbox.start, _TEXT, max_files)
        try:
            program = await asyncio.shield(starting)
        except SandboxError as error:
            raise self._error(f"needs a sandbox: {error}") from error
        except asyncio.CancelledError:
            program = await starting
            await loop.run_in_executor(self._thread, program.close)
            raise
        reader = asyncio.StreamReader(limit=_MAX_REPLY_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        reading, _ = await loop.connect_read_pipe(lambda: protocol, program.stdout)
        writing, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, program.stdin)

        async def end() -> None:
            for pipe in (writing, reading):
                if not pipe.is_closing():  # as they are if the program has ended
                    pipe.close()
            await loop.run_in_executor(self._thread, program.close)

        return _Host(reader, writing.write, end)

    async def _close(self, host: _Host) -> None:
        self._hosts.discard(host)
        await host.close()

    def _error(self, text: str) -> RolloutError:
        return RolloutError(f"{self._label} {text}")

    def _failed(self, text: str) -> EnvironmentFailedError:
        remedy = "correct it, or set rollout.episodes.on_error=zero"
        return EnvironmentFailedError(f"{self._label} {text}; {remedy}", "error")

    def _lost(self, text: str) -> AgentLostError:
        remedy = "see whether a program that it ran, or a lack of memory, ended it"
        return AgentLostError(f"{self._label} {text}; {remedy}", "lost")
