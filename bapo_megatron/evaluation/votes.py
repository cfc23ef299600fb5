"""Which answers to a problem are the same: the votes of maj@k.

Answers are compared by the code that grades, in its worker processes and under its limits: 1/2 and
0.5 are one answer. In the order of the samples, an answer joins the first cluster whose first
answer it equals, or begins a new one. Equal texts are compared once.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bapo_megatron.evaluation.estimators import NO_VOTE
from bapo_megatron.reward.pool import RewardPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bapo_megatron.config.reward import RewardConfig

_MOST_TIMEOUTS = 3
"""Of one problem; after them its answers are compared by their text only."""
_SLOW_S = 0.5
_LONGEST_SLOW_S = 20.0
"""What the comparisons of one problem that took ``_SLOW_S`` or more may take in all; after it its
answers are compared by their text only."""


@dataclass(frozen=True, slots=True)
class Votes:
    """The votes on one problem."""

    clusters: tuple[int, ...]
    """For each sample the number of its answer's cluster, from 0, or ``NO_VOTE``."""
    num_timeouts: int
    """Comparisons that exceeded a limit; the two answers count as different. One more where the
    problem's comparisons were too slow in all."""


def votes_pool(config: RewardConfig) -> RewardPool:
    """The processes that compare answers, by the function ``math`` whatever functions reward."""
    return RewardPool(config.workers, config.timeout_s, memory_limit_mb=config.memory_limit_mb)


async def count_votes(answers: Sequence[Sequence[str]], rewards: RewardPool) -> list[Votes]:
    """Find the clusters of every problem.

    Args:
        answers: For each problem the answer of each sample; empty where there is none.
        rewards: Compares, by the function ``math``.

    Raises:
        RewardError: Comparing failed (inside an exception group).
    """
    # Not more problems than workers at a time, so that no comparison's time is spent waiting.
    turn = asyncio.Semaphore(rewards.num_workers)

    async def count(problem: Sequence[str]) -> Votes:
        async with turn:
            return await _count(problem, rewards)

    async with asyncio.TaskGroup() as tasks:
        votes = [tasks.create_task(count(problem)) for problem in answers]
    return [task.result() for task in votes]


async def _count(answers: Sequence[str], rewards: RewardPool) -> Votes:
    first_answers: list[str] = []
    cluster_of = {"": NO_VOTE}
    num_timeouts = 0
    slow_s = 0.0
    for answer in answers:
        if answer in cluster_of:
            continue
        for cluster, first in enumerate(first_answers):
            if num_timeouts >= _MOST_TIMEOUTS or slow_s > _LONGEST_SLOW_S:
                break
            began_s = time.monotonic()
            score = await rewards.score(rf"\boxed{{{answer}}}", first)
            took_s = time.monotonic() - began_s
            slow_s += took_s if took_s >= _SLOW_S else 0.0
            num_timeouts += score.timed_out
            if score.reward > 0:
                cluster_of[answer] = cluster
                break
        if answer not in cluster_of:
            cluster_of[answer] = len(first_answers)
            first_answers.append(answer)
    num_timeouts += slow_s > _LONGEST_SLOW_S
    return Votes(tuple(cluster_of[answer] for answer in answers), num_timeouts)
