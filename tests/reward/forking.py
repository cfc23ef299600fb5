"""Reward functions whose process forks: each child comes back from the call, or tries to.

A response is a whole number, and its reward is that number. Where it is divisible by 5, the process
forks first.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import sys
import time
from pathlib import Path

from bapo_megatron.environment.base import Step


def _forks(response) -> bool:
    """Whether this process is the forked child."""
    return int(response) % 5 == 0 and os.fork() == 0


def at_once(response):
    _forks(response)
    return float(response)


def by_an_error(response):
    if _forks(response):
        time.sleep(0.001)
        raise RuntimeError("the program was not found")
    return float(response)


def in_c(response):
    if int(response) % 5 == 0:  # without Python's hooks, as a library forks
        ctypes.CDLL(None).fork()
    return float(response)


async def in_a_coroutine(response):
    await asyncio.sleep(0)
    _forks(response)
    return float(response)


async def uses_a_thread(response):
    """Look something up as an HTTP client does, with a loop that a forked child shares."""
    if _forks(response):
        sys.exit(0)
    await asyncio.get_running_loop().run_in_executor(None, time.sleep, 0.001)
    return float(response)


def daemon(response):
    """A child closes what it inherited, opens files of its own, and forks again."""
    if _forks(response):
        os.closerange(3, 64)
        with Path(f"/proc/{os.getpid()}/stat").open() as first, Path("/proc/stat").open() as second:
            if os.fork() == 0:
                os._exit(0 if first.read(1) and second.read(1) else 5)
            os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
    elif int(response) % 5 == 0:
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    return float(response)


class Episodes:
    """An environment whose state is the numbers that it was told."""

    def start(self, task):
        if _forks(task.answer):
            time.sleep(0.005 * (int(task.answer) % 3))
        return [task.answer]

    def step(self, state, turn):
        _forks(turn.text)
        return Step([*state, turn.text], [], (), is_done=True)


def _write_to_pipes(line: str) -> None:
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the end for reading, or one that is closed again
            if int(entry.name) > 2 and str(entry.readlink()).startswith("pipe:"):
                os.write(int(entry.name), line.encode() + b"\n")


def _forged(number: int) -> str:
    return json.dumps({"id": number, "result": [{"reward": 99.0, "answer_found": True}]})


def forge_this_id(response):
    _write_to_pipes(_forged(2))  # 1 is the worker
    return float(response)


def forge_next_id(response):
    for number in (5, 6, 7, 8):
        _write_to_pipes(_forged(number))
    return float(response)


def forge_no_json(response):
    _write_to_pipes("a line of the library")
    return float(response)


def forge_no_object(response):
    _write_to_pipes("7")
    return float(response)
