"""Environments of a user, good and bad; the workers import this module."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from bapo_megatron.environment.base import Step

NOT_A_CLASS = 7


class Countdown:
    """Asks again until nothing is left; the row says how often."""

    def start(self, task):
        return {"left": task.row["turns"], "seed": task.seed, "heard": ()}

    def step(self, state, turn):
        heard = [*state["heard"], turn.text]
        state = {**state, "left": state["left"] - 1, "heard": heard}
        if state["left"] == 0:
            return Step(state, is_done=True)
        return Step(state, messages=[{"role": "user", "content": f"{state['left']} left"}])


class Tokens:
    """Writes back what it was given, reversed; slowly, as one that waits for something."""

    async def start(self, task):
        await asyncio.sleep(0.01)

    async def step(self, state, turn):
        await asyncio.sleep(0.01)
        return Step(turn.remaining_tokens, token_ids=turn.token_ids[::-1])


class Bad:
    """Does what the first turn's text says."""

    def start(self, task):
        return getattr(self, task.answer)() if task.answer else None

    def step(self, state, turn):
        return getattr(self, turn.text)()

    def fine(self):
        return Step(1, is_done=True)

    def raises(self):
        raise RuntimeError("cannot\nstep")

    def hang(self):
        while True:
            time.sleep(1)

    def leave(self):
        os._exit(3)

    def eat_memory(self):
        return Step(len(bytearray(2 << 30)), is_done=True)

    def print_and_read(self):
        print("printed by an environment", flush=True)  # noqa: T201
        return Step(sys.stdin.read(), is_done=True)

    def a_dictionary(self):
        return {"is_done": True}

    def a_set(self):
        return {1, 2}

    def set_as_state(self):
        return Step({1, 2}, is_done=True)

    def nan_as_state(self):
        return Step(float("nan"), is_done=True)

    def large_state(self):
        return Step("x" * 1_000_000, is_done=True)

    def deep_state(self):
        state = "[]]" * 200  # brackets in a text do not count
        for _ in range(101):
            state = [state]
        return Step(state, is_done=True)

    def deepest_state(self):
        state = '[[[\\"{' * 200
        for _ in range(100):
            state = {"inner": state}
        return Step(state, is_done=True)

    def bottomless_state(self):
        state = []
        for _ in range(100_000):
            state = [state]
        return Step(state, is_done=True)

    def message_without_content(self):
        return Step(1, messages=[{"role": "user"}])

    def message_of_numbers(self):
        return Step(1, messages=[{"role": "user", "content": 5}])

    def message_of_half_a_pair(self):
        return Step(1, messages=[{"role": "user", "content": "\ud800"}])

    def message_as_text(self):
        return Step(1, messages=["hello"])

    def messages_as_text(self):
        return Step(1, messages="hello")

    def texts_as_tokens(self):
        return Step(1, token_ids=["5"])

    def fractions_as_tokens(self):
        return Step(1, token_ids=[5, 5.5])

    def negative_tokens(self):
        return Step(1, token_ids=[-1])

    def number_as_tokens(self):
        return Step(1, token_ids=5)

    def truth_as_tokens(self):
        return Step(1, token_ids=[True])

    def nothing(self):
        return Step(1)

    def both(self):
        return Step(1, messages=[{"role": "user", "content": "a"}], token_ids=[1])

    def done_and_more(self):
        return Step(1, token_ids=[1], is_done=True)

    def done_in_words(self):
        return Step(1, is_done="yes")

    def much(self):
        return Step(1, messages=[{"role": "user", "content": "x" * 4_000_000}])


class EndsOnce:
    """Ends its first process, as something from outside may."""

    def start(self, task):
        return task.row["path"]

    def step(self, state, turn):
        is_first = not Path(state).exists()
        with Path(state).open("a") as stream:
            stream.write(f"{os.getpid()}\n")
        if is_first:
            os._exit(1)
        return Step(state, is_done=True)


class WithoutStep:
    def start(self, task):
        return None


class StepOfOne:
    def start(self, task):
        return None

    def step(self, state):
        return Step(state, is_done=True)


class WithArguments:
    def __init__(self, path):
        self.path = path


class Greedy(Countdown):
    def __init__(self):
        self.table = bytearray(8 << 30)


class Boundless(Countdown):
    def __init__(self):
        self.table = bytearray(1 << 60)  # no machine has as much


class Outer:
    class Inner(Countdown):
        pass
