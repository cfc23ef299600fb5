"""A taskset of verifiers 0.4 in the style of its documentation; it knows nothing of training."""

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["ColumnSumsEnv", "ColumnSumsTaskset"]

BOXED = re.compile(r"\\boxed\{(\d{1,4})\}")


class ColumnSumsData(vf.TaskData):
    digits: list[int]


class ColumnSumsTask(vf.Task[ColumnSumsData]):
    @vf.reward
    async def right_sum(self, trace: vf.Trace) -> float:
        digits = self.data.digits
        ones, tens = sum(digits), sum(digits) // 10 + sum(digits[1:])
        turns = [BOXED.findall(message.content or "") for message in trace.assistant_messages]
        return float([boxed[-1:] for boxed in turns] == [[str(ones)], [str(tens)]])


class ColumnSumsEnv(vf.SingleAgentEnv):
    """Asks for the ones, then for the tens with what they carry."""

    async def run(self, task: ColumnSumsTask, agents: vf.Agents) -> None:
        """Play one episode."""
        async with agents.agent.interaction(task) as interaction:
            ones = BOXED.findall((await interaction.turn()).last_reply)
            if ones:
                tens = [int(ones[-1]) // 10, *task.data.digits[1:]]
                await interaction.turn("+".join(map(str, tens)) + "=?")


class ColumnSumsTaskset(vf.Taskset[ColumnSumsTask, vf.TasksetConfig]):
    """Sums of two to four random digits."""

    INFINITE = True

    def load(self) -> Iterator[ColumnSumsTask]:
        """Yield tasks without end."""
        rng = random.Random(0)
        while True:
            digits = [rng.randrange(10) for _ in range(rng.choice((2, 3, 4)))]
            data = ColumnSumsData(prompt="+".join(map(str, digits)) + "=?", digits=digits)
            yield ColumnSumsTask(data, self.config.task)
