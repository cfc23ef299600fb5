"""Environments of a user, good and bad; the workers import this module."""

import array
import asyncio
import os
import time

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


def nested(state, depth, wrap):
    for _ in range(depth):
        state = wrap(state)
    return state


RETURNED = {
    "fine": Step(1, is_done=True),
    "array": Step(1, token_ids=array.array("q", [5, 6])),  # as numpy and torch have it
    "a_dictionary": {"is_done": True},
    "set_as_state": Step({1, 2}, is_done=True),
    "nan_as_state": Step(float("nan"), is_done=True),
    "large_state": Step("x" * 1_000_000, is_done=True),
    # Brackets in a text do not count.
    "deep_state": Step(nested("[]]" * 200, 101, lambda inner: [inner]), is_done=True),
    "deepest_state": Step(nested('[[[\\"{' * 200, 100, lambda inner: {"": inner}), is_done=True),
    "bottomless_state": Step(nested([], 100_000, lambda inner: [inner]), is_done=True),
    "message_without_content": Step(1, messages=[{"role": "user"}]),
    "message_of_numbers": Step(1, messages=[{"role": "user", "content": 5}]),
    "message_of_half_a_pair": Step(1, messages=[{"role": "user", "content": "\ud800"}]),
    "message_as_text": Step(1, messages=["hello"]),
    "messages_as_text": Step(1, messages="hello"),
    "texts_as_tokens": Step(1, token_ids=["5"]),
    "fractions_as_tokens": Step(1, token_ids=[5, 5.5]),
    "negative_tokens": Step(1, token_ids=[-1]),
    "number_as_tokens": Step(1, token_ids=5),
    "truth_as_tokens": Step(1, token_ids=[True]),
    "nothing": Step(1),
    "both": Step(1, messages=[{"role": "user", "content": "a"}], token_ids=[1]),
    "done_and_more": Step(1, token_ids=[1], is_done=True),
    "done_in_words": Step(1, is_done="yes"),
}


class Bad:
    """Does, or returns, what the first turn's text says."""

    def start(self, task):
        return {1, 2} if task.answer == "a_set" else None

    def step(self, state, turn):
        return RETURNED[turn.text] if turn.text in RETURNED else getattr(self, turn.text)()

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
