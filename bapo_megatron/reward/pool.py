"""Grading in worker processes, each answer under a limit of time and memory.

A worker that exceeds a limit is killed and replaced; nothing that a model writes can hang or crash
the collector. Workers import neither torch nor transformers, and end with the parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, Self

from bapo_megatron.reward.base import RewardError, Score

if TYPE_CHECKING:
    from asyncio.subprocess import Process

MEMORY_LIMIT_BYTES = 2 << 30
"""Address space of one worker; sympy itself needs some 60 MB."""
_START_TIMEOUT_S = 60.0


class RewardPool:
    """Grades concurrently; belongs to the event loop that first calls ``score``."""

    def __init__(self, workers: int, timeout_s: float, function: str = "math") -> None:
        """Set the pool up; each worker starts with the first answer it gets.

        Args:
            workers: Number of worker processes.
            timeout_s: Time limit of one answer, not counting the wait for a free worker.
            function: A key of ``registry.REWARD_FUNCTIONS``.
        """
        self._timeout_s = timeout_s
        self._function = function
        self._idle: asyncio.Queue[Process | None] = asyncio.Queue()
        for _ in range(workers):
            self._idle.put_nowait(None)
        self._running: set[Process] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def score(self, response_text: str, answer: str) -> Score:
        """Grade one response; waits for a free worker.

        Returns:
            The score; with ``timed_out`` and reward 0 where a limit was exceeded.

        Raises:
            RewardError: The reward function failed, no worker starts, or the pool is closed.
        """
        worker = await self._idle.get()
        try:
            if worker is None or worker.returncode is not None:
                worker = await self._start()
            self._refuse_if_closed()
            request = {"response_text": response_text, "answer": answer}
            reply = None
            with contextlib.suppress(TimeoutError):
                # Not wait_for: in Python 3.11 it loses a cancellation that comes with the reply.
                async with asyncio.timeout(self._timeout_s):
                    reply = await _ask(worker, request)
            self._refuse_if_closed()
            if reply is None:
                await self._end(worker)
                worker = None
                return Score(reward=0.0, answer_found=False, timed_out=True)
        except BaseException:
            # Its answer was not read: the worker is out of step and of no use any more.
            if worker is not None:
                await self._end(worker)
                worker = None
            raise
        finally:
            self._idle.put_nowait(worker)
        if "error" in reply:
            raise RewardError(
                f"reward function '{self._function}' failed: {reply['error']}; correct it"
            )
        return Score(**reply)

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
            self._function,
            str(os.getpid()),
            str(MEMORY_LIMIT_BYTES),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
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
            if reply is None:
                await self._end(worker)
        self._refuse_if_closed()
        if reply is None:
            raise RewardError(
                f"a reward worker ended while it started, or took {_START_TIMEOUT_S:g} s (exit "
                f"code {worker.returncode}); its own message stands above"
            )
        return worker

    async def _end(self, worker: Process) -> None:
        # Not worker.kill(): it polls, and would take the exit status from asyncio's own waiter.
        if worker.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
        await worker.wait()
        self._running.discard(worker)


async def _ask(worker: Process, request: dict[str, str]) -> dict[str, Any] | None:
    """Send a request and return the reply, or none where the worker died."""
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(request).encode() + b"\n")
    with contextlib.suppress(ConnectionError):
        await worker.stdin.drain()
    return await _read(worker)


async def _read(worker: Process) -> dict[str, Any] | None:
    assert worker.stdout is not None
    line = await worker.stdout.readline()
    if not line.endswith(b"\n"):
        return None
    reply: dict[str, Any] = json.loads(line)
    return reply
