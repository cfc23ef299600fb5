"""From the samples of a set to its scores.

The code that grades also decides, in its worker processes and under its limits, which answers to a
problem are the same for the votes of maj@k: 1/2 and 0.5 are one answer. In the order of the
samples, an answer joins the first cluster whose first answer it equals, or begins a new one. Equal
texts are compared once.

Shape legend: P = problems, M = estimates.
"""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.evaluation.estimators import (
    NO_VOTE,
    candidates,
    intervals,
    is_right,
    majority_at_k,
    pass_at_k,
)
from bapo_megatron.evaluation.samples import EvalSample
from bapo_megatron.reward.pool import RewardPool
from bapo_megatron.types import EvalProblem, EvalResult, EvalScore, FinishReason

_MAX_TIMEOUTS = 3
"""After so many, the answers to a problem are compared by their text only."""
_SLOW_S = 0.5
_MAX_SLOW_S = 20.0
"""What the slow comparisons of one problem (``_SLOW_S`` or more each) may take in all; then its
answers are compared by their text only."""


async def summarise(
    name: str,
    samples: Sequence[Sequence[EvalSample]],
    rewards: RewardPool,
    *,
    settings: Mapping[str, Any],
    k_values: Sequence[int],
    num_resamples: int,
    seed: int,
) -> EvalResult:
    """Score a set.

    Args:
        name: The set's name.
        samples: For each prompt its n samples, by index.
        rewards: Compares answers with each other, by the function ``math``.
        settings: What the samples were made with.
        k_values: k of pass@k and maj@k, besides n; those above n are left out.
        num_resamples: Resamples of the bootstrap.
        seed: Decides the resamples.

    Raises:
        RewardError: Comparing failed (inside an exception group).
    """
    # Sorted, whichever finished first (``a:2`` before ``a:10``): the bootstrap draws by place.
    samples = sorted(samples, key=lambda group: (len(group[0].prompt_id), group[0].prompt_id))
    votes = await count_votes([[s.extracted for s in group] for group in samples], rewards)
    problems = tuple(
        EvalProblem(group[0].prompt_id, group[0].answer, tuple(s.reward for s in group), clusters)
        for group, (clusters, _) in zip(samples, votes, strict=True)
    )
    # Seconds for a thousand problems, which the event loop of a collector cannot spare.
    scores = await asyncio.to_thread(
        scores_of, problems, k_values, num_resamples=num_resamples, seed=seed
    )
    flat = [sample for group in samples for sample in group]
    return _result(name, flat, problems, scores, sum(num for _, num in votes), settings)


def _result(
    name: str,
    flat: Sequence[EvalSample],
    problems: tuple[EvalProblem, ...],
    scores: tuple[EvalScore, ...],
    comparison_timeouts: int,
    settings: Mapping[str, Any],
) -> EvalResult:
    """The scores, and what all samples together cost."""
    num_each = len(problems[0].rewards)
    lengths = np.array([sample.num_tokens for sample in flat])
    num_tokens = int(lengths.sum())
    wall_s = max(sample.elapsed_s for sample in flat)
    num_found = sum(sample.answer_found for sample in flat)
    return EvalResult(
        name=name,
        num_prompts=len(problems),
        samples_per_prompt=num_each,
        answer_found_share=num_found / len(flat),
        response_tokens_mean=num_tokens / len(flat),
        response_tokens_median=float(np.median(lengths)),
        response_tokens_p95=float(np.quantile(lengths, 0.95)),
        truncated_share=sum(s.finish_reason is FinishReason.LENGTH for s in flat) / len(flat),
        missing_answers=len(flat) - num_found,
        grading_timeouts=sum(sample.timed_out for sample in flat),
        comparison_timeouts=comparison_timeouts,
        generated_tokens=num_tokens,
        wall_s=wall_s,
        tokens_per_s=num_tokens / wall_s if wall_s > 0 else 0.0,
        version=max(sample.version for sample in flat),
        settings=settings,
        scores=scores,
        problems=problems,
        environment_errors=sum(s.finish_reason is FinishReason.ENVIRONMENT for s in flat),
        grading_errors=sum(sample.failed for sample in flat),
        reward_means=_reward_means(flat),
    )


def _reward_means(flat: Sequence[EvalSample]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for sample in flat:
        components = sample.components if len(sample.components) > 1 else {}
        for name, value in (*components.items(), *sample.metrics.items()):
            values.setdefault(name, []).append(value)
    return {name: math.fsum(values[name]) / len(values[name]) for name in sorted(values)}


def scores_of(
    problems: Sequence[EvalProblem], k_values: Sequence[int], *, num_resamples: int, seed: int
) -> tuple[EvalScore, ...]:
    """Return avg@n, pass@k and maj@k with their intervals; arguments as in ``summarise``."""
    names, values_PM = values_by_problem(problems, k_values)
    ends_2M = intervals(values_PM, num_resamples, seed)
    return tuple(
        EvalScore(name, math.fsum(column_P) / len(problems), float(low), float(high))
        for name, column_P, low, high in zip(names, values_PM.T, *ends_2M, strict=True)
    )


def values_by_problem(
    problems: Sequence[EvalProblem], k_values: Sequence[int]
) -> tuple[list[str], np.ndarray]:
    """Return the M names of the estimates, and their values for each problem, [P, M] float64.

    Args:
        problems: At least one; all with n samples.
        k_values: k of pass@k and maj@k, besides n; those above n are left out. maj@1 is left out
            as well, except for n = 1: it is pass@1.
    """
    num_samples = len(problems[0].rewards)
    sizes = sorted({k for k in k_values if k <= num_samples} | {num_samples})
    majority_sizes = [k for k in sizes if k > 1 or num_samples == 1]
    names = [f"avg@{num_samples}"]
    names += [f"pass@{k}" for k in sizes] + [f"maj@{k}" for k in majority_sizes]
    rows = []
    for problem in problems:
        num_right = sum(map(is_right, problem.rewards))
        clusters = candidates(problem.votes, problem.rewards)
        rows.append(
            [math.fsum(problem.rewards) / num_samples]
            + [pass_at_k(num_samples, num_right, k) for k in sizes]
            + [majority_at_k(num_samples, clusters, k) for k in majority_sizes]
        )
    return names, np.array(rows)


def is_shown(name: str, problems: Sequence[EvalProblem]) -> bool:
    """Return whether a table needs this score: where every reward is 0 or 1, pass@1 is avg@n."""
    return name != "pass@1" or any(
        reward not in (0.0, 1.0) for problem in problems for reward in problem.rewards
    )


def votes_pool(config: RewardConfig) -> RewardPool:
    """Make the pool that compares answers, by the function ``math`` whatever functions reward."""
    return RewardPool(config.workers, config.timeout_s, memory_limit_mb=config.memory_limit_mb)


async def count_votes(
    answers: Sequence[Sequence[str]], rewards: RewardPool
) -> list[tuple[tuple[int, ...], int]]:
    """Find the clusters of every problem.

    Args:
        answers: For each problem the answer of each sample; empty where there is none.
        rewards: Compares, by the function ``math``.

    Returns:
        For each problem the number of each answer's cluster, from 0, or ``NO_VOTE``, and how many
        comparisons exceeded a limit: the two answers count as different. It is one more where the
        problem's comparisons were too slow in all.

    Raises:
        RewardError: Comparing failed (inside an exception group).
    """
    # Not more problems than workers at a time, so that no comparison's time is spent waiting.
    turn = asyncio.Semaphore(rewards.num_workers)
    async with asyncio.TaskGroup() as tasks:
        votes = [tasks.create_task(_count(problem, rewards, turn)) for problem in answers]
    return [task.result() for task in votes]


async def _count(
    answers: Sequence[str], rewards: RewardPool, turn: asyncio.Semaphore
) -> tuple[tuple[int, ...], int]:
    first_answers: list[str] = []
    cluster_of = {"": NO_VOTE}
    num_timeouts, slow_s = 0, 0.0
    async with turn:
        for answer in answers:
            if answer in cluster_of:
                continue
            for cluster, first in enumerate(first_answers):
                if num_timeouts >= _MAX_TIMEOUTS or slow_s > _MAX_SLOW_S:
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
    num_timeouts += slow_s > _MAX_SLOW_S
    return tuple(cluster_of[answer] for answer in answers), num_timeouts
