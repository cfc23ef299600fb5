"""Grading in worker processes, each answer under a limit of time and memory.

A worker that exceeds a limit is killed and replaced, with every process it started; nothing that a
model writes can hang or crash the collector. Workers import neither torch nor transformers unless
a reward function does, and end with the parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from bapo_megatron.reward.base import FunctionFailedError, Response, RewardError, Score
from bapo_megatron.reward.functions import BUILT_IN

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Sequence

MEMORY_LIMIT_MB = 2048
"""Address space of one worker, unless configured; sympy itself needs some 60 MB."""
LIMIT = "limit"
"""``Score.reason`` of an answer that exceeded a limit."""
_START_TIMEOUT_S = 60.0
_SECOND_LOOK_S = 0.05
_LONGEST_REPLY_BYTES = 1 << 20


class RewardPool:
    """Grades concurrently; belongs to the event loop that first calls ``score``."""

    def __init__(
        self,
        workers: int,
        timeout_s: float,
        functions: Sequence[str] = ("math",),
        memory_limit_mb: int = MEMORY_LIMIT_MB,
    ) -> None:
        """Set the pool up; each worker starts with the first answer it gets.

        Args:
            workers: Number of worker processes.
            timeout_s: Time limit of one answer, not counting the wait for a free worker.
            functions: What the workers can run: ``math``, ``package.module:function``.
            memory_limit_mb: Limit of a worker's address space, in 10^6 · 1.048576 bytes.
        """
        self.num_workers = workers
        """How many requests are worked on at a time."""
        self._timeout_s = timeout_s
        self._functions = tuple(functions)
        self._memory_limit_bytes = memory_limit_mb << 20
        self._idle: asyncio.Queue[Process | None] = asyncio.Queue()
        for _ in range(workers):
            self._idle.put_nowait(None)
        self._running: set[Process] = set()
        self._closed = False
        self.num_killed = 0
        """Workers so far that were ended because an answer exceeded a limit, or that died on it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @property
    def functions(self) -> tuple[str, ...]:
        """What the workers can run."""
        return self._functions

    async def start(self) -> None:
        """Start one worker, so that a function that cannot be loaded is found now.

        Raises:
            RewardError: A function cannot be loaded, or no worker starts.
        """
        worker = await self._idle.get()
        try:
            if worker is None or worker.returncode is not None:
                worker = await self._start()
        finally:
            self._idle.put_nowait(worker)

    async def score(self, response: str | Response, answer: str = "", function: str = "") -> Score:
        """Grade one response; waits for a free worker.

        Args:
            response: The decoded response, or all that is known of it.
            answer: The reference answer, where ``response`` is a text.
            function: Which of the pool's functions; the first one if empty.

        Returns:
            The score; with ``timed_out`` and reward 0 where a limit was exceeded.

        Raises:
            RewardError: The reward function failed, no worker starts, or the pool is closed.
        """
        if not isinstance(response, Response):
            response = Response(response, answer)
        function = function or self._functions[0]
        if function in BUILT_IN:  # these need neither, and a row may be large
            response = Response(response.text, response.answer)
        reply = await self._request(
            {
                "function": function,
                "text": response.text,
                "answer": response.answer,
                "sample": asdict(response.sample),
                "row": dict(response.row),
            }
        )
        if reply is None:
            return Score(reward=0.0, answer_found=False, timed_out=True, reason=LIMIT)
        if "error" in reply:
            raise FunctionFailedError(
                f"reward function '{function}' failed: {reply['error']}; correct it, or set "
                "reward.on_error=zero"
            )
        return Score(**reply)

    async def matches(self, pattern: str | None, text: str) -> bool | None:
        r"""Whether a text has what ``reward.format`` wants; none where a limit was exceeded.

        Args:
            pattern: A regular expression that is searched for; none: a closed ``\boxed{…}``.
            text: A response.

        Raises:
            RewardError: No worker starts, or the pool is closed.
        """
        reply = await self._request({"pattern": pattern, "text": text})
        if reply is None:
            return None
        if "error" in reply:
            raise RewardError(f"reward.format.pattern failed: {reply['error']}; correct it")
        return bool(reply["matches"])

    async def _request(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """A worker's reply, or none where a limit was exceeded, or two workers died of it."""
        reply = await self._try(request)
        if reply is None:  # it may have been ended from outside
            reply = await self._try(request)
        return None if reply is None or LIMIT in reply else reply

    async def _try(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """A worker's reply, ``{"limit": true}`` after a limit, or none where the worker died."""
        worker = await self._idle.get()
        try:
            if worker is None or worker.returncode is not None:
                worker = await self._start()
            self._refuse_if_closed()
            reply = await self._reply(worker, request)
            self._refuse_if_closed()
            if reply is None or LIMIT in reply:
                self.num_killed += 1
                await self._end(worker)
                worker = None
        except BaseException:
            # Its answer was not read: the worker is out of step and of no use any more.
            if worker is not None:
                await self._end(worker)
                worker = None
            raise
        finally:
            self._idle.put_nowait(worker)
        return reply

    async def _reply(self, worker: Process, request: dict[str, Any]) -> dict[str, Any] | None:
        """A running worker's reply, as ``_try`` returns it."""
        asking = asyncio.create_task(_ask(worker, request))
        try:
            # The second look is for a loop that stood still until the time was over, with the reply
            # in the pipe. Not wait_for: in Python 3.11 it loses a cancellation that comes with it.
            for timeout_s in (self._timeout_s, _SECOND_LOOK_S):
                if (await asyncio.wait([asking], timeout=timeout_s))[0]:
                    return asking.result()
            return {LIMIT: True}
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def close(self) -> None:
        """End every worker; answers in progress raise ``RewardError``. Safe to call twice."""
        self._closed = True
        for worker in list(self._running):
            await self._end(worker)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RewardError("the reward pool is closed; score before closing it")

    async def _start(self) -> Process:
        """Start a worker and wait until it can grade."""
        self._refuse_if_closed()
        worker = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "bapo_megatron.reward.worker",
            json.dumps(self._functions),
            str(os.getpid()),
            str(self._memory_limit_bytes),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LONGEST_REPLY_BYTES,
            start_new_session=True,  # so that what a function starts is killed with it
        )
        self._running.add(worker)
        reply = None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_START_TIMEOUT_S):
                    reply = await _read(worker)
                    if reply is None:
                        await worker.wait()  # its output has ended: it is exiting by itself
        finally:
            if reply is None or "error" in reply:
                await self._end(worker)
        self._refuse_if_closed()
        if reply is None:
            raise RewardError(
                f"a reward worker ended while it started, or took {_START_TIMEOUT_S:g} s (exit "
                f"code {worker.returncode}); its own message stands above"
            )
        if "error" in reply:
            raise RewardError(f"reward function {reply['error']}")
        return worker

    async def _end(self, worker: Process) -> None:
        # Not worker.kill(): it polls, and would take the exit status from asyncio's own waiter.
        if worker.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        await worker.wait()
        self._running.discard(worker)


async def _ask(worker: Process, request: dict[str, Any]) -> dict[str, Any] | None:
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
    reply: dict[str, Any] = json.loads(line)
    return reply
