r"""A calculator that adds by columns, and leaves each column to the policy.

After ``5+9+0+3=?`` and ``\boxed{17}`` it writes down the 7 and asks for ``1+9+0+3=?``.
"""

import re

from bapo_megatron.environment.base import Step, Task, Turn

BOXED = re.compile(r"\\boxed\{(\d{1,4})\}")


class Calculator:
    def start(self, task: Task) -> dict:
        digits = [int(digit) for digit in re.findall(r"\d", task.prompt)]
        carried = sum(digits) // 10
        goal = 10 * (carried + sum(digits[1:])) + sum(digits) % 10
        return {"next": digits[1:], "goal": goal, "last": None, "result": None}

    def step(self, state: dict, turn: Turn) -> Step:
        boxed = BOXED.findall(turn.text)
        if not boxed:
            return Step(state, is_done=True)
        total = int(boxed[-1])
        if turn.number == 1:
            return Step({**state, "result": 10 * total + state["last"]}, is_done=True)
        column = "+".join(str(digit) for digit in (total // 10, *state["next"]))
        return Step(
            {**state, "last": total % 10}, messages=[{"role": "user", "content": f"{column}=?"}]
        )

    @staticmethod
    def score(state: dict) -> float:
        return float(state["result"] == state["goal"])
