"""Worker processes under limits, for code that may hang, crash or exhaust memory.

A worker that exceeds a limit is killed, with every process it started, and replaced, as is one
whose earlier requests left too little memory for the next; no request can hang or crash the process
that owns the pool. Workers end with their parent.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import resource
import secrets
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from bapo_megatron.runtime.processes import describe_exit, kill_marked

_LOG = logging.getLogger(__name__)
_START_TIMEOUT_S = 70.0
"""Time limit of a worker's imports."""
_MARK = "BAPO_MEGATRON_WORKER"
"""Environment variable that marks a worker's descendants, in any session."""
_SECOND_LOOK_S = 0.05
_EXIT_S = 0.5
_MAX_REPLY_BYTES = 16 << 20


class Outcome(NamedTuple):
    """The outcome of one request."""

    kind: str
    """``result``; ``error``: the handler raised one; ``timeout``, ``memory``: it exceeded a limit;
    ``died``: two workers exited during this request, or sent something else than its reply."""
    value: Any = None
    """The handler's result, a JSON value, or its error in one line."""


class WorkerPool:
    """Answers requests concurrently; belongs to the event loop that first uses it."""

    def __init__(
        self,
        handler: str,
        arguments: Sequence[Any],
        *,
        label: str,
        workers: int,
        timeout_s: float,
        memory_limit_mb: int,
        error: Callable[[str], Exception],
    ) -> None:
        """Set up the pool; each worker starts with its first request.

        Args:
            handler: ``module:function`` that builds a ``worker.Handler`` in each worker.
            arguments: The function's arguments, JSON values.
            label: What the workers load, for messages: ``environment 'games:Chess'``.
            workers: Number of workers.
            timeout_s: Time limit of a request, not counting the wait for a free worker or a
                processor.
            memory_limit_mb: Limit of a worker's address space, in MiB.
            error: The exception, built from a message, for a handler that cannot be built, a worker
                that does not start, and a closed pool.
        """
        self._handler = handler, json.dumps(list(arguments))
        self._label = label
        self._timeout_s = timeout_s
        self._memory_limit_bytes = memory_limit_mb << 20
        self._error = error
        self._idle: asyncio.Queue[Process | None] = asyncio.Queue()
        for _ in range(workers):
            self._idle.put_nowait(None)
        self._running: dict[Process, str] = {}
        """Each worker's value of ``_MARK``: the pool's prefix, then the worker's number."""
        self._max_bytes: WeakKeyDictionary[Process, int] = WeakKeyDictionary()
        """Address space at which a worker is replaced: halfway from its size after its first reply
        to the limit."""
        self._mark = f"{secrets.token_hex(8)}."
        self._numbers = itertools.count(1)
        """Numbers of workers and requests."""
        self._facts: Any = None
        self._closed = False

    async def start(self) -> Any:
        """Start one worker, so that a bad handler fails now; return the handler's ``facts``."""
        self._idle.put_nowait(await self._take())
        return self._facts

    async def ask(self, request: Any) -> Outcome:
        """Have a worker answer; if it dies, perhaps for another reason, retry with a second one."""
        outcome = await self._try(request)
        return await self._try(request) if outcome.kind == "died" else outcome

    async def close(self) -> None:
        """Stop every worker; requests in progress raise the pool's error. Safe to call twice."""
        self._closed = True
        workers = list(self._running)
        self._running.clear()  # a single search for the processes of all workers
        await self._let_exit()
        await asyncio.gather(*map(self._end, workers))
        if workers:
            await asyncio.to_thread(kill_marked, _MARK, self._mark)

    async def _let_exit(self) -> None:
        """Give idle workers a moment to exit by themselves, and to clean up."""
        idle = []
        for _ in range(self._idle.qsize()):
            worker = self._idle.get_nowait()
            self._idle.put_nowait(None)  # whoever takes it finds the pool closed
            if worker is not None and worker.stdin is not None:
                worker.stdin.close()
                idle.append(asyncio.create_task(worker.wait()))
        if idle:
            await asyncio.wait(idle, timeout=_EXIT_S)
            for task in idle:
                task.cancel()

    async def _take(self) -> Process:
        """Wait for a free worker, which the caller must put back."""
        worker = await self._idle.get()
        try:
            if worker is not None and worker.returncode is not None:
                await self._end(worker)
                worker = None
            return worker or await self._start()
        except BaseException:
            self._idle.put_nowait(None)
            raise

    async def _try(self, request: Any) -> Outcome:
        worker = await self._take()
        is_kept = False
        try:
            self._refuse_if_closed()
            reply = await self._reply(worker, request)
            self._refuse_if_closed()
            outcome = Outcome(*reply.popitem())
            is_kept = outcome.kind in ("result", "error") and self._has_room(worker)
            return outcome
        finally:
            self._idle.put_nowait(worker if is_kept else None)
            if not is_kept:
                await self._end(worker)

    async def _reply(self, worker: Process, request: Any) -> dict[str, Any]:
        """Return the worker's reply without its id, or ``timeout`` or ``died``."""
        number = next(self._numbers)
        asking = asyncio.create_task(_ask(worker, {"id": number, "request": request}))
        try:
            # The second look is for an event loop that was blocked past the timeout while the reply
            # was in the pipe.
            timeout_s, starved_s = self._timeout_s, _starved_s(worker.pid)
            while not (await asyncio.wait([asking], timeout=timeout_s))[0]:
                if timeout_s == _SECOND_LOOK_S:
                    return {"timeout": True}
                before_s, starved_s = starved_s, _starved_s(worker.pid)
                timeout_s = max(starved_s - before_s, _SECOND_LOOK_S)
            reply = asking.result()
            # A reply with another id was written by the handler's own code.
            has_its_id = reply is not None and reply.pop("id", None) == number
            return reply if reply and has_its_id else {"died": True}
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise self._error("the pool of workers is closed; ask before closing it")

    async def _start(self) -> Process:
        """Start a worker and wait until it is ready."""
        self._refuse_if_closed()
        options = str(os.getpid()), str(self._memory_limit_bytes)
        mark = f"{self._mark}{next(self._numbers)}."
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bapo_megatron.runtime.worker", *self._handler, *options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_REPLY_BYTES,
            env={**os.environ, _MARK: mark},
            start_new_session=True,  # so that child processes are killed with it
        )
        self._running[worker] = mark
        message, how = None, f"was not ready within {_START_TIMEOUT_S:g} s"
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_START_TIMEOUT_S):
                    message = await read_message(worker.stdout)
                    if message is None:  # its output closed: it is exiting by itself
                        status = describe_exit(await worker.wait())
                        how = f"ended before it was ready ({status})"
        finally:
            if message is None or "error" in message or self._closed:
                await self._end(worker)
        self._refuse_if_closed()
        if message is None:
            raise self._error(
                f"{self._label}: the process that loads it {how}; see what it printed, and let its "
                "module neither exit nor wait when it is imported"
            )
        if "error" in message:
            raise self._error(message["error"])
        self._facts = message["ready"]
        return worker

    def _has_room(self, worker: Process) -> bool:
        """Whether earlier requests have left enough memory for the next one."""
        size = _size(worker.pid)
        if size < self._max_bytes.setdefault(worker, (size + self._memory_limit_bytes) // 2):
            return True
        _LOG.warning("%s: replacing a worker that has grown to %d MB", self._label, size >> 20)
        return False

    async def _end(self, worker: Process) -> None:
        # Not worker.kill(), which polls and would take the exit status from asyncio's waiter.
        # The group outlives the worker, so its id is not reused.
        if worker.returncode is None or not Path(f"/proc/{worker.pid}").exists():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        await worker.wait()
        if (mark := self._running.pop(worker, None)) is not None:
            await asyncio.to_thread(kill_marked, _MARK, mark)


def _starved_s(pid: int) -> float:
    """Return how long a process waited for a processor; 0 if the kernel does not count it."""
    return _proc_number(pid, "schedstat", 1) / 1e9


def _size(pid: int) -> int:
    """Return the bytes of a process's address space; 0 if it has exited."""
    return _proc_number(pid, "statm", 0) * resource.getpagesize()


def _proc_number(pid: int, name: str, index: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/{name}").read_text().split()[index])
    except (OSError, IndexError):
        return 0


async def _ask(worker: Process, request: Any) -> dict[str, Any] | None:
    """Send a request and return the reply, or None if the worker died."""
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(request).encode() + b"\n")
    with contextlib.suppress(ConnectionError):
        await worker.stdin.drain()
    return await read_message(worker.stdout)


async def read_message(reader: asyncio.StreamReader | None) -> dict[str, Any] | None:
    """Return a worker's next message; None if it exited or wrote something else."""
    assert reader is not None, "the worker's output is a pipe"
    try:
        line = await reader.readline()
        message = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError, OSError):  # too long, or not JSON
        return None
    return message if isinstance(message, dict) else None
