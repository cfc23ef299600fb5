"""Runs agents, in a process of any interpreter from Python 3.9 on and with the standard library.

Its text is a program: ``python -c TEXT``, or the first frame of a sandbox. It reads and writes
lines of JSON. The first one has options: ``function`` (``module:function``) or ``command`` (words),
``path`` (directories of modules, the first to work in), the proxy's ``base_url`` or the ``socket``
on which it listens, to which a port of this network namespace is then forwarded, ``mark`` and
``parent``, and ``secret``, which every reply repeats, because a sandbox's other processes may write
to its output. Then

    ← {"ready": true}, or {"error": "…"} if the function cannot be loaded
    → {"id": 1, "task": {…}, "key": "sk-…"}        start an episode
    ← {"id": 1, "result": …} or {"id": 1, "error": "…"}, with "is_killed" after a signal
    → {"cancel": 1}                                end it

When its input closes or its parent dies, every process with its mark ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import importlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

_MARK = "BAPO_MEGATRON_AGENT"
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_LOG = "logs/collector.log"
_MAX_LINE = 64 << 20
_MAX_ERROR = 300
_MAX_RESULT = 2 << 20
"""Bytes of a reply, and of a command's output that are read: the last ones."""
_MAX_THREADS = 4096
"""A function that waits for a turn has a thread, and so has a command."""
_STACK_BYTES = 2 << 20
_BACKLOG = 4096
_CHUNK_BYTES = 1 << 16


class _KilledError(Exception):
    """A command was ended by a signal, which a program that it ran may have sent."""


class Worker:
    """The episodes that run here."""

    def __init__(self, options: dict[str, Any], output: BinaryIO) -> None:
        self._options = options
        self._output = output
        self._secret = options.pop("secret", "")
        self._base_url = options.get("base_url", "")
        self._function: Any = None
        self._tasks: dict[int, asyncio.Future[None]] = {}
        threading.stack_size(_STACK_BYTES)  # of hundreds of threads, within the address space
        self._threads = ThreadPoolExecutor(_MAX_THREADS)

    async def run(self, requests: asyncio.StreamReader) -> None:
        """Run episodes until the input closes."""
        if "socket" in self._options:
            server = await asyncio.start_server(self._forward, "127.0.0.1", 0, backlog=_BACKLOG)
            self._base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        os.environ["OPENAI_BASE_URL"] = self._base_url
        os.environ["ANTHROPIC_BASE_URL"] = self._base_url[: -len("/v1")]  # its SDK adds /v1
        if "function" in self._options:
            try:
                self._function = _loaded(self._options["function"])
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's module
                self._send({"error": _shown(error)})
                return
        self._send({"ready": True})
        while line := await requests.readline():
            message = json.loads(line)
            if "cancel" not in message:
                self._start(**message)
            elif message["cancel"] in self._tasks:
                self._tasks[message["cancel"]].cancel()

    def _start(self, id: int, task: dict[str, Any], key: str) -> None:
        playing = asyncio.ensure_future(self._play(id, task, key))
        self._tasks[id] = playing
        playing.add_done_callback(functools.partial(self._ended, id))

    def _ended(self, number: int, playing: asyncio.Future[None]) -> None:
        del self._tasks[number]
        if playing.cancelled() or playing.exception():  # nobody listens if the owner did it
            self._send({"id": number, "error": "its coroutine was cancelled, or ended by a panic"})

    async def _play(self, number: int, task: dict[str, Any], key: str) -> None:
        try:
            if self._function is None:
                result = await self._run_command(task, key)
            elif inspect.iscoroutinefunction(self._function):
                result = await self._function(task, self._base_url, key)
            else:
                call = functools.partial(self._function, task, self._base_url, key)
                result = await asyncio.get_running_loop().run_in_executor(self._threads, call)
            self._send({"id": number, "result": result})
        except _KilledError as error:
            self._send({"id": number, "error": str(error), "is_killed": True})
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the agent's own
            traceback.print_exception(type(error), error, error.__traceback__)
            self._send({"id": number, "error": _shown(error)})

    async def _run_command(self, task: dict[str, Any], key: str) -> Any:
        """Return the JSON value in the last line of a command's output; null without a line."""
        # Sockets: a command's children can open its pipes and files again, through /proc.
        loop, output = asyncio.get_running_loop(), bytearray()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            process = subprocess.Popen(
                self._options["command"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                env={**os.environ, "OPENAI_API_KEY": key, "ANTHROPIC_API_KEY": key},
                start_new_session=True,
            )
            theirs.close()
            loop.add_reader(ours, lambda: _take(ours, output) or loop.remove_reader(ours))
            writing = asyncio.ensure_future(_write(ours, json.dumps(task).encode() + b"\n"))
            try:
                status = await loop.run_in_executor(self._threads, process.wait)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # all of it, or what it left behind
                loop.remove_reader(ours)
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)  # before the socket closes
            for _ in range(_MAX_RESULT // _CHUNK_BYTES):  # more than a socket holds
                if not _take(ours, output):
                    break
        _, _, line = output.decode(errors="replace").replace("\r", "\n").strip().rpartition("\n")
        if status < 0 or 128 < status < 128 + signal.NSIG:  # as shells report it
            raise _KilledError(f"exit status {status}, by a signal")
        if status != 0:
            raise RuntimeError(f"exit status {status}; its standard error is in {_LOG}")
        try:
            return json.loads(line) if line else None
        except ValueError as error:
            told = f"the last line of output must be JSON, got {line[:80]!r}"
            raise ValueError(told) from error

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            proxy = await asyncio.open_unix_connection(self._options["socket"])
        except OSError:  # no descriptor is left, or the run has ended: the client sees it
            writer.close()
            return
        await asyncio.gather(_copy(reader, proxy[1]), _copy(proxy[0], writer))

    def _send(self, message: dict[str, Any]) -> None:
        message["secret"] = self._secret
        content = json.dumps(message).encode()
        if len(content) > _MAX_RESULT:
            error = f"returned {len(content)} bytes of JSON; return at most {_MAX_RESULT}"
            content = json.dumps({**message, "result": None, "error": error}).encode()
        self._output.write(content + b"\n")
        self._output.flush()


def _take(connection: socket.socket, output: bytearray) -> int:
    """Read what a socket holds, keeping the last bytes; return 0 at its end, or if it is empty."""
    try:
        part = connection.recv(_CHUNK_BYTES)
    except OSError:
        return 0
    output += part
    del output[:-_MAX_RESULT]
    return len(part)


async def _write(connection: socket.socket, content: bytes) -> None:
    with contextlib.suppress(OSError):  # the command does not read it
        await asyncio.get_running_loop().sock_sendall(connection, content)
        connection.shutdown(socket.SHUT_WR)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while content := await reader.read(1 << 16):
            writer.write(content)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


def _loaded(name: str) -> Any:
    module, _, attributes = name.partition(":")
    function = importlib.import_module(module)
    for attribute in attributes.split("."):
        function = getattr(function, attribute)
    inspect.signature(function).bind("task", "base_url", "api_key")  # type: ignore[arg-type]
    return function


def _detach(pipes: list[BinaryIO], has_mark: bool) -> None:
    """Have a forked child neither keep the pipes open nor use them.

    Where marks end processes, that of the child must be readable, as its parent's is not.
    """
    _prctl(_PR_SET_DUMPABLE, int(has_mark))
    null = os.open(os.devnull, os.O_RDWR)
    while pipes:  # in its own children these descriptors may be other files
        os.dup2(null, pipes.pop().fileno(), inheritable=False)
    os.close(null)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _shown(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_ERROR]


def _end(mark: str) -> None:
    """Kill the processes with the mark, this one last."""
    text = f"{_MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*") if mark else ():
        with contextlib.suppress(OSError):  # another user's, or it has just ended
            is_marked = text in (entry / "environ").read_bytes().split(b"\0")
            if is_marked and int(entry.name) != os.getpid():
                os.kill(int(entry.name), signal.SIGKILL)
    os._exit(0)


async def main() -> None:
    """Run until the input closes."""
    # Agents' prints go to standard error, not between the messages; what they read is empty.
    source, output = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    requests = asyncio.StreamReader(limit=_MAX_LINE)
    protocol = asyncio.StreamReaderProtocol(requests)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, source)
    options = json.loads(await requests.readline() or "{}")
    mark = options.get("mark", "")
    # Programs that agents start can neither read the memory of this process nor change it.
    _prctl(_PR_SET_DUMPABLE, 0)
    detach = functools.partial(_detach, [source, output], bool(mark))
    os.register_at_fork(after_in_child=detach)
    for number in (signal.SIGINT, signal.SIGUSR1):  # the owner decides when agents end
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _end(mark))
    if "parent" in options:
        # A signal, because an agent may keep the event loop from noticing the end of the input.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != options["parent"]:
            _end(mark)
    sys.path[:0] = options["path"]
    os.chdir(options["path"][0])
    try:
        await Worker(options, output).run(requests)
    except Exception:  # noqa: BLE001 - the owner sees that it ended, and people why
        traceback.print_exc()
    finally:
        _end(mark)


if __name__ == "__main__":
    asyncio.run(main())
