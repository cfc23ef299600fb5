"""Worker processes for code that may hang, crash or take all memory, under limits.

A worker that exceeds a limit is killed and replaced, with every process it started; nothing in a
request can hang or crash the process that owns the pool. Workers end with their parent.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

_START_TIMEOUT_S = 60.0
_SECOND_LOOK_S = 0.05
_MAX_REPLY_BYTES = 16 << 20


class WorkersError(RuntimeError):
    """A pool cannot answer requests."""


class HandlerNotLoadedError(WorkersError):
    """The handler cannot be built; the message is the handler's own."""


class WorkerNotStartedError(WorkersError):
    """A worker ended while it started; the message is what follows an article and a name."""


class WorkersClosedError(WorkersError):
    """The pool was closed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request."""

    kind: Literal["result", "error", "timeout", "memory", "died"]
    """``error``: the handler raised one. ``timeout``, ``memory``: it exceeded a limit. ``died``:
    two workers ended over this request, or replied with more than can be read."""
    result: Any = None
    """What the handler returned, a JSON value."""
    error: str = ""
    """The handler's error, one line."""


class WorkerPool:
    """Answers requests concurrently; belongs to the event loop that first uses it."""

    def __init__(
        self,
        handler: str,
        arguments: Sequence[Any],
        *,
        workers: int,
        timeout_s: float,
        memory_limit_mb: int,
    ) -> None:
        """Set the pool up; each worker starts with the first request it gets.

        Args:
            handler: ``module:function`` that builds a ``worker.Handler`` in each worker.
            arguments: The function's arguments, JSON values.
            workers: Number of worker processes.
            timeout_s: Time limit of one request, not counting the wait for a free worker.
            memory_limit_mb: Limit of a worker's address space, in 10^6 · 1.048576 bytes.
        """
        self.num_killed = 0
        """Workers so far that were ended because a request exceeded a limit, or died on one."""
        self._handler = handler, json.dumps(list(arguments))
        self._timeout_s = timeout_s
        self._memory_limit_bytes = memory_limit_mb << 20
        self._idle: asyncio.Queue[Process | None] = asyncio.Queue()
        for _ in range(workers):
            self._idle.put_nowait(None)
        self._running: set[Process] = set()
        self._facts: Any = None
        self._closed = False

    async def start(self) -> Any:
        """Start one worker, so that a bad handler is found now; return the handler's ``facts``.

        Raises:
            WorkersError: The handler cannot be built, no worker starts, or the pool is closed.
        """
        worker = await self._idle.get()
        try:
            if worker is None or worker.returncode is not None:
                worker = await self._start()
        finally:
            self._idle.put_nowait(worker)
        return self._facts

    async def ask(self, request: Any) -> Outcome:
        """Have a free worker answer; if it dies, another one: it may have been ended from outside.

        Raises:
            WorkersError: The handler cannot be built, no worker starts, or the pool is closed.
        """
        outcome = await self._try(request)
        return await self._try(request) if outcome.kind == "died" else outcome

    async def close(self) -> None:
        """End every worker; requests in progress raise ``WorkersError``. Safe to call twice."""
        self._closed = True
        for worker in list(self._running):
            await self._end(worker)

    async def _try(self, request: Any) -> Outcome:
        worker = await self._idle.get()
        try:
            if worker is None or worker.returncode is not None:
                worker = await self._start()
            self._refuse_if_closed()
            outcome = await self._outcome(worker, request)
            self._refuse_if_closed()
            if outcome.kind not in ("result", "error"):
                self.num_killed += 1
                await self._end(worker)
                worker = None
        except BaseException:
            # Its reply was not read: the worker is out of step and of no use any more.
            if worker is not None:
                await self._end(worker)
                worker = None
            raise
        finally:
            self._idle.put_nowait(worker)
        return outcome

    async def _outcome(self, worker: Process, request: Any) -> Outcome:
        asking = asyncio.create_task(_ask(worker, request))
        try:
            # The second look is for a loop that stood still until the time was over, with the reply
            # in the pipe. Not wait_for: in Python 3.11 it loses a cancellation that comes with it.
            for timeout_s in (self._timeout_s, _SECOND_LOOK_S):
                if (await asyncio.wait([asking], timeout=timeout_s))[0]:
                    return _outcome_of(asking.result())
            return Outcome("timeout")
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise WorkersClosedError("the pool of workers is closed")

    async def _start(self) -> Process:
        """Start a worker and wait until it can answer."""
        self._refuse_if_closed()
        options = str(os.getpid()), str(self._memory_limit_bytes)
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bapo_megatron.worker", *self._handler, *options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_REPLY_BYTES,
            start_new_session=True,  # so that what a handler starts is killed with it
        )
        self._running.add(worker)
        message = None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_START_TIMEOUT_S):
                    message = await _read(worker)
                    if message is None:
                        await worker.wait()  # its output has ended: it is exiting by itself
        finally:
            if message is None or "error" in message or self._closed:
                await self._end(worker)
        self._refuse_if_closed()
        if message is None:
            raise WorkerNotStartedError(
                f"worker ended while it started, or took {_START_TIMEOUT_S:g} s (exit "
                f"code {worker.returncode}); its own message stands above"
            )
        if "error" in message:
            raise HandlerNotLoadedError(message["error"])
        self._facts = message["ready"]
        return worker

    async def _end(self, worker: Process) -> None:
        # Not worker.kill(): it polls, and would take the exit status from asyncio's own waiter.
        if worker.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        await worker.wait()
        self._running.discard(worker)


def _outcome_of(reply: dict[str, Any] | None) -> Outcome:
    if reply is None:
        return Outcome("died")
    if "error" in reply:
        return Outcome("error", error=reply["error"])
    return Outcome("memory") if "memory" in reply else Outcome("result", reply["result"])


async def _ask(worker: Process, request: Any) -> dict[str, Any] | None:
    """Send a request and return the reply, or none where the worker died."""
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(request).encode() + b"\n")
    with contextlib.suppress(ConnectionError):
        await worker.stdin.drain()
    return await _read(worker)


async def _read(worker: Process) -> dict[str, Any] | None:
    """The next message, or none where the process ended or wrote something else."""
    assert worker.stdout is not None
    try:
        line = await worker.stdout.readline()
    except ValueError:  # longer than any reply
        return None
    if not line.endswith(b"\n"):
        return None
    message: dict[str, Any] = json.loads(line)
    return message
