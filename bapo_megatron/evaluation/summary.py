"""From the samples of a set to its scores."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from bapo_megatron.evaluation.bootstrap import intervals
from bapo_megatron.evaluation.estimators import (
    average,
    candidates,
    is_right,
    majority_at_k,
    pass_at_k,
)
from bapo_megatron.evaluation.votes import count_votes
from bapo_megatron.types import EvalProblem, EvalResult, EvalScore, FinishReason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bapo_megatron.evaluation.samples import EvalSample
    from bapo_megatron.reward.pool import RewardPool


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
        name: Of the set.
        samples: For each prompt its n samples, by index.
        rewards: Compares answers with each other, by the function ``math``.
        settings: What the samples were made with.
        k_values: Of pass@k and maj@k, beside n; those above n are left out.
        num_resamples: Of the bootstrap.
        seed: Of the bootstrap.

    Raises:
        RewardError: Comparing failed (inside an exception group).
    """
    # In one order, whoever finished first: the bootstrap draws by position.
    samples = sorted(samples, key=_place)
    votes = await count_votes([[s.extracted for s in group] for group in samples], rewards)
    problems = tuple(
        EvalProblem(
            prompt_id=group[0].prompt_id,
            answer=group[0].answer,
            rewards=tuple(sample.reward for sample in group),
            votes=vote.clusters,
        )
        for group, vote in zip(samples, votes, strict=True)
    )
    # Seconds for a thousand problems, which the event loop of a collector cannot spare.
    scores = await asyncio.to_thread(
        scores_of, problems, k_values, num_resamples=num_resamples, seed=seed
    )
    num_timeouts = sum(vote.num_timeouts for vote in votes)
    flat = [sample for group in samples for sample in group]
    return _result(name, flat, problems, scores, num_timeouts, settings)


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
    value_of = {score.name: score.value for score in scores}
    lengths = np.array([sample.num_tokens for sample in flat])
    wall_s = max(sample.elapsed_s for sample in flat)
    num_found = sum(sample.answer_found for sample in flat)
    return EvalResult(
        name=name,
        num_prompts=len(problems),
        samples_per_prompt=num_each,
        avg_at_k=value_of[f"avg@{num_each}"],
        pass_at_k=value_of[f"pass@{num_each}"],
        maj_at_k=value_of[f"maj@{num_each}"],
        answer_found_share=num_found / len(flat),
        response_tokens_mean=int(lengths.sum()) / len(flat),
        response_tokens_median=float(np.median(lengths)),
        response_tokens_p95=float(np.quantile(lengths, 0.95)),
        truncated_share=sum(s.finish_reason is FinishReason.LENGTH for s in flat) / len(flat),
        missing_answers=len(flat) - num_found,
        grading_timeouts=sum(sample.timed_out for sample in flat),
        comparison_timeouts=comparison_timeouts,
        generated_tokens=int(lengths.sum()),
        wall_s=wall_s,
        tokens_per_s=int(lengths.sum()) / wall_s if wall_s > 0 else 0.0,
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


def _place(group: Sequence[EvalSample]) -> tuple[int, str]:
    """Sorts ``a:2`` before ``a:10``."""
    return len(group[0].prompt_id), group[0].prompt_id


def scores_of(
    problems: Sequence[EvalProblem], k_values: Sequence[int], *, num_resamples: int, seed: int
) -> tuple[EvalScore, ...]:
    """avg@n, pass@k and maj@k with their intervals.

    Args:
        problems: At least one; all with n samples.
        k_values: Of pass@k and maj@k, beside n; those above n are left out. maj@1 is left out as
            well, except for n = 1: it is pass@1.
        num_resamples: Of the bootstrap.
        seed: Of the bootstrap.
    """
    names, values_PM = values_by_problem(problems, k_values)
    ends_2M = intervals(values_PM, num_resamples, seed)
    return tuple(
        EvalScore(name, math.fsum(column_P) / len(problems), float(low), float(high))
        for name, column_P, low, high in zip(names, values_PM.T, *ends_2M, strict=True)
    )


def values_by_problem(
    problems: Sequence[EvalProblem], k_values: Sequence[int]
) -> tuple[list[str], np.ndarray]:
    """The estimates of each problem.

    Returns:
        The M names, and [P, M] float64.
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
            [average(problem.rewards)]
            + [pass_at_k(num_samples, num_right, k) for k in sizes]
            + [majority_at_k(num_samples, clusters, k) for k in majority_sizes]
        )
    return names, np.array(rows)
