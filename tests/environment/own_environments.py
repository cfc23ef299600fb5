"""Environments of a user, good and bad; the workers import this module."""

import asyncio
import os
import time

from bapo_megatron.environment.base import Step


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


def nested(state, depth, wrap):
    for _ in range(depth):
        state = wrap(state)
    return state


class Bad:
    """Does what a turn's text says."""

    def start(self, task):
        return None

    def step(self, state, turn):
        return getattr(self, turn.text)()

    def fine(self):
        return Step(1, is_done=True)

    def returns_no_step(self):
        return {"is_done": True}

    def deepest_state(self):
        # Brackets in a text do not count.
        return Step(nested('[[[\\"{' * 200, 100, lambda inner: {"": inner}), is_done=True)

    def raises(self):
        raise RuntimeError("cannot\nstep")

    def hang(self):
        while True:
            time.sleep(1)

    def leave(self):
        os._exit(3)

    def eat_memory(self):
        return Step(len(bytearray(2 << 30)), is_done=True)


class WithoutStep:
    def start(self, task):
        return None


class StepOfOne:
    def start(self, task):
        return None

    def step(self, state):
        return Step(state, is_done=True)


class Boundless(Countdown):
    def __init__(self):
        self.table = bytearray(1 << 60)  # no machine has as much
