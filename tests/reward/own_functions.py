"""Reward functions of a user, good and bad; the workers import this module."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

NOT_CALLABLE = 7
EVEN_LENGTH = {"name": "even", "function": "tests.reward.own_functions:even_length"}
"""A random model is never right; about half of its responses have an even length."""
_LOOPS = set()


def length(response):
    return len(response)


def even_length(response):
    return float(len(response) % 2 == 0)


async def slow_length(response, answer):
    _LOOPS.add(id(asyncio.get_running_loop()))
    await asyncio.sleep(0.01)
    assert len(_LOOPS) == 1, "one loop for all answers, so that clients can be kept"
    return float(len(response) + len(answer))


def everything(response, answer, sample, row):
    return {
        "reward": 0.25,
        "reason": f"{response} {answer} {sample.prompt_id} {sample.source} {sample.prompt}",
        "extracted": f"{sample.finish_reason} {sample.is_truncated}",
        "level": row["level"],
        "tokens": sample.num_tokens,
    }


def wrong_parameter(completion):
    return 0.0


def by_position(response, /):
    return 0.0


def raises(response):
    raise RuntimeError(f"cannot\nscore {response}")


def hang():
    while True:
        time.sleep(1)


def spin(response):
    """Compute for ever, unless there is nothing to be done."""
    while response:
        pass
    return 1.0


def count_tries(response):
    with Path(response).open("a") as stream:
        stream.write(f"{os.getpid()}\n")
    time.sleep(0.5)
    return 7.0


def eat_memory():
    return len(bytearray(8 << 30))


_KEPT = []


def keep_memory():
    """Keeps 100 MiB more after each response."""
    _KEPT.append(bytearray(100 << 20))
    return 1.0


def exits():
    sys.exit(0)


def start_a_process_and_hang(response):
    child = subprocess.Popen(["sleep", "600"])
    Path(response).write_text(str(child.pid))
    hang()


def fork(response, answer):
    child = os.fork()
    if child == 0:
        time.sleep(60)  # with the worker's end of the pipe, so that only its exit is seen
        os._exit(0)
    Path(response).write_text(str(child))
    if answer == "crash":
        os._exit(1)
    return 1.0


def replaces_json(response):
    json.dumps = json.loads = lambda *_, **__: ""
    return len(response)


def start_a_session(response):
    started = subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo $!"], stdout=subprocess.PIPE, start_new_session=True
    )
    Path(response).write_text(started.stdout.readline().decode())
    return 1.0


def print_and_read(answer):
    print("printed by a function", flush=True)  # noqa: T201
    assert sys.stdin.read() == ""
    return int(answer)


def episode(turns, state, sample):
    return {
        "reward": len(turns),
        "reason": " | ".join(turns),
        "extracted": str(state),
        "turns": sample.num_turns,
        "written": sample.environment_tokens,
    }


class OfGroups:
    """Functions that see the responses to a prompt together."""

    @staticmethod
    def rank(responses, answer, row):
        """How many are shorter, with a metric."""
        lengths = [len(response) for response in responses]
        return [
            {"reward": sum(map(length.__gt__, lengths)), "reason": answer, "size": row["size"]}
            for length in lengths
        ]

    @staticmethod
    async def above_mean(rewards, samples, states, **others):
        await asyncio.sleep(0.01)
        assert sorted(others) == ["answer", "responses", "row"]
        mean = sum(rewards) / len(rewards)
        facts = zip(rewards, samples, states, strict=True)
        return np.array(
            [reward - mean + sample.num_tokens + state for reward, sample, state in facts]
        )

    @staticmethod
    def raises(responses):
        raise RuntimeError(f"cannot score {len(responses)}")

    @staticmethod
    def hang(responses):
        hang()

    @staticmethod
    def mixed(responses, turns=()):
        return [0.0] * len(responses)

    @staticmethod
    def unknown(responses, question):
        return [0.0] * len(responses)

    def not_static(self, responses):
        return [0.0] * len(responses)
