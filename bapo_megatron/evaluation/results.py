"""From the samples of a set to its scores, and scores as JSON and tables.

The code that grades also decides, in its worker processes and under its limits, which answers to a
problem are the same for the votes of maj@k: 1/2 and 0.5 are one answer. In the order of the
samples, an answer joins the first cluster whose first answer it equals, or begins a new one. Equal
texts are compared once.

Shape legend: P = problems, M = estimates.
"""

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from bapo_megatron.config.evaluation import MAX_SAMPLES, EvalConfig
from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.evaluation.estimators import (
    NO_VOTE,
    UNKNOWN_VOTE,
    candidates,
    intervals,
    is_right,
    majority_at_k,
    pass_at_k,
)
from bapo_megatron.evaluation.samples import MAX_NUMBER, EvalSample, ResultsError
from bapo_megatron.reward.pool import RewardPool
from bapo_megatron.runtime.calls import decode_json
from bapo_megatron.runtime.files import atomic_write_text, read_regular
from bapo_megatron.telemetry.console import markdown_table, print_table
from bapo_megatron.telemetry.metrics import means_by_name
from bapo_megatron.types import EvalProblem, EvalResult, EvalScore, FinishReason

_MAX_TIMEOUTS = 3
"""After this many, the answers to a problem are compared by their text only."""
_SLOW_S = 0.5
_MAX_SLOW_S = 20.0
"""Limit of the total time of one problem's slow comparisons (``_SLOW_S`` or more each); then its
answers are compared by their text only."""
_SCORE_HEADINGS = ("set", "score", "value", "95 % interval")
_SAMPLE_COLUMNS: dict[str, Callable[[EvalResult], str]] = {
    "set": lambda r: r.name,
    "problems": lambda r: f"{r.num_prompts:,}",
    "samples": lambda r: f"{r.num_prompts * r.samples_per_prompt:,}",
    "tokens mean": lambda r: f"{r.response_tokens_mean:,.1f}",
    "median": lambda r: f"{r.response_tokens_median:,.1f}",
    "p95": lambda r: f"{r.response_tokens_p95:,.1f}",
    "truncated": lambda r: f"{r.truncated_share:.1%}",
    "no answer": lambda r: (
        f"{r.missing_answers:,} ({1 - r.answer_found_share:.1%})" if r.has_votes else "–"
    ),
    "grading timeouts": lambda r: f"{r.grading_timeouts:,}",
    "tokens": lambda r: f"{r.generated_tokens:,}",
    "time": lambda r: f"{r.wall_s:,.1f} s",
    "tokens/s": lambda r: f"{r.tokens_per_s:,.0f}",
}
_SETTINGS = (
    *("weights", "samples_per_prompt", "temperature"),
    *("top_p", "top_k", "max_response_tokens"),
)


async def summarise(
    name: str,
    samples: Sequence[Sequence[EvalSample]],
    rewards: RewardPool,
    config: EvalConfig,
    *,
    settings: Mapping[str, Any],
    seed: int,
) -> EvalResult:
    """Score a set.

    Args:
        name: The set's name.
        samples: For each prompt its n samples, by index.
        rewards: Compares answers with each other, by the function ``math``.
        config: k of pass@k and maj@k, besides n, and the resamples of the bootstrap.
        settings: How the samples were made.
        seed: Decides the resamples.

    Raises:
        RewardError: Comparing failed (inside an exception group).
    """
    # Sorted, whichever finished first (``a:2`` before ``a:10``): the bootstrap draws by place.
    samples = sorted(samples, key=lambda group: (len(group[0].prompt_id), group[0].prompt_id))
    answers = [[s.extracted or (None if s.answer_found else "") for s in g] for g in samples]
    votes = await count_votes(answers, rewards)
    problems = tuple(
        EvalProblem(group[0].prompt_id, group[0].answer, tuple(s.reward for s in group), clusters)
        for group, (clusters, _) in zip(samples, votes, strict=True)
    )
    flat = [sample for group in samples for sample in group]
    lengths = np.array([sample.num_tokens for sample in flat])
    num_tokens, wall_s = int(lengths.sum()), max(sample.elapsed_s for sample in flat)
    num_answers = sum(sample.answer_found for sample in flat)
    parts = [{**(s.components if len(s.components) > 1 else {}), **s.metrics} for s in flat]
    return EvalResult(
        name=name,
        num_prompts=len(problems),
        samples_per_prompt=len(samples[0]),
        answer_found_share=num_answers / len(flat),
        response_tokens_mean=num_tokens / len(flat),
        response_tokens_median=float(np.median(lengths)),
        response_tokens_p95=float(np.quantile(lengths, 0.95)),
        truncated_share=sum(s.finish_reason is FinishReason.LENGTH for s in flat) / len(flat),
        missing_answers=len(flat) - num_answers,
        grading_timeouts=sum(sample.timed_out for sample in flat),
        comparison_timeouts=sum(num for _, num in votes),
        generated_tokens=num_tokens,
        wall_s=wall_s,
        tokens_per_s=num_tokens / wall_s if wall_s > 0 else 0.0,
        version=max(sample.version for sample in flat),
        settings=settings,
        # Seconds for a thousand problems, which the event loop of a collector cannot spare.
        scores=await asyncio.to_thread(scores_of, problems, config, seed),
        problems=problems,
        environment_errors=sum(s.finish_reason is FinishReason.ENVIRONMENT for s in flat),
        grading_errors=sum(sample.failed for sample in flat),
        reward_means=means_by_name(parts),
    )


def scores_of(
    problems: Sequence[EvalProblem], config: EvalConfig, seed: int
) -> tuple[EvalScore, ...]:
    """Return avg@n, pass@k and maj@k with their intervals; arguments as in ``summarise``."""
    names, values_PM = values_by_problem(problems, config.k_values)
    ends_2M = intervals(values_PM, config.bootstrap_resamples, seed)
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
            as well, except for n = 1: it is pass@1. All maj@k are left out if a vote is unknown.
    """
    num_samples = len(problems[0].rewards)
    sizes = sorted({k for k in k_values if k <= num_samples} | {num_samples})
    majority_sizes = [k for k in sizes if k > 1 or num_samples == 1]
    if any(UNKNOWN_VOTE in problem.votes for problem in problems):
        majority_sizes = []
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


def limits_of(name: str, problems: Sequence[EvalProblem]) -> tuple[float, float]:
    """Return the least and the greatest value that a score can have.

    They are 0 and 1, except for avg@n where a reward is outside.
    """
    is_share = not name.startswith("avg@") or all(
        0 <= reward <= 1 for problem in problems for reward in problem.rewards
    )
    return (0.0, 1.0) if is_share else (-math.inf, math.inf)


def votes_pool(config: RewardConfig) -> RewardPool:
    """Return a pool that compares answers by ``math``, whatever the reward functions are."""
    return RewardPool(config.workers, config.timeout_s, memory_limit_mb=config.memory_limit_mb)


async def count_votes(
    answers: Sequence[Sequence[str | None]], rewards: RewardPool
) -> list[tuple[tuple[int, ...], int]]:
    """Find the clusters of every problem.

    Args:
        answers: For each problem the answer of each sample; empty where there is none, None where
            it was not returned.
        rewards: Compares, by the function ``math``.

    Returns:
        For each problem the number of each answer's cluster, from 0, ``NO_VOTE`` or
        ``UNKNOWN_VOTE``, and how many comparisons exceeded a limit: the two answers count as
        different. It is one more where the problem's comparisons were too slow in all.

    Raises:
        RewardError: Comparing failed (inside an exception group).
    """
    # Not more problems than workers at a time, so that no comparison's time is spent waiting.
    turn = asyncio.Semaphore(rewards.num_workers)
    async with asyncio.TaskGroup() as tasks:
        votes = [tasks.create_task(_count(problem, rewards, turn)) for problem in answers]
    return [task.result() for task in votes]


async def _count(
    answers: Sequence[str | None], rewards: RewardPool, turn: asyncio.Semaphore
) -> tuple[tuple[int, ...], int]:
    first_answers: list[str] = []
    cluster_of = {"": NO_VOTE, None: UNKNOWN_VOTE}
    num_timeouts, slow_s = 0, 0.0
    async with turn:
        for answer in answers:
            if answer is None or answer in cluster_of:
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


def print_results(results: Sequence[EvalResult], console: Console) -> None:
    """Print scores and samples as tables, and ``scoring_lines``."""
    print_table(console, "Scores", _SCORE_HEADINGS, _score_rows(results), num_left=2)
    print_table(console, "Samples", list(_SAMPLE_COLUMNS), _sample_rows(results), num_left=1)
    for line in scoring_lines(results):
        console.print(line, markup=False, highlight=False)


def write_results(results: Sequence[EvalResult], json_path: Path) -> None:
    """Write the results as JSON, and as markdown beside it.

    Raises:
        OSError: A file cannot be written.
    """
    entries = ",\n".join(map(_json_of, results))
    atomic_write_text(json_path, f"[\n{entries}\n]\n")
    settings = [
        [result.name, *(str(result.settings.get(key, "?")) for key in _SETTINGS)]
        for result in results
    ]
    tables = (
        markdown_table(_SCORE_HEADINGS, _score_rows(results), num_left=2),
        markdown_table(list(_SAMPLE_COLUMNS), _sample_rows(results), num_left=1),
        markdown_table(["set", *_SETTINGS], settings, num_left=2),
    )
    text = "# Evaluation\n\n" + "\n".join(tables)
    text += "".join(f"\n{line}\n" for line in scoring_lines(results))
    atomic_write_text(json_path.with_suffix(".md"), f"{text}\nDefinitions: docs/evaluation.md.\n")


def read_results(path: Path) -> list[EvalResult]:
    """Read what ``write_results`` wrote.

    Raises:
        ResultsError: It is not such a file.
        OSError: It cannot be read.
    """
    try:
        results = decode_json(list[EvalResult], read_regular(path))
        _check(results)
    except ValueError as error:
        raise ResultsError(
            f"{path}: holds no results that this version reads ({error}); give the eval.json of "
            "an evaluation"
        ) from error
    return results


def _check(results: Sequence[EvalResult]) -> None:
    """Raise ValueError for results that contradict themselves."""
    for result in results:
        num_each, ids = result.samples_per_prompt, {p.prompt_id for p in result.problems}
        is_sound = 1 <= num_each <= MAX_SAMPLES and 0 < len(ids) == len(result.problems)
        if not is_sound or not all(
            len(problem.rewards) == len(problem.votes) == num_each
            and all(abs(reward) <= MAX_NUMBER for reward in problem.rewards)
            for problem in result.problems
        ):
            raise ValueError(
                f"rewards or votes of '{result.name}' contradict its number of samples"
            )
    if not results or len({result.name for result in results}) < len(results):
        raise ValueError("the list must have sets, no two with one name")


def scoring_lines(results: Sequence[EvalResult]) -> list[str]:
    """Return the terms of each score, unless it is one function's, and what functions missed."""
    sums, failures = [], []
    for result in results:
        functions = result.settings.get("reward", {}).get("functions", ())
        terms = [f"{f['weight']:g} {f['name']}".removeprefix("1 ") for f in functions]
        if terms and terms != [functions[0]["name"]]:
            sums.append(f"{result.name}: scored by {' + '.join(terms)}")
        if result.grading_errors:
            failures.append(
                f"{result.name}: a reward function failed on {result.grading_errors:,} samples, "
                "which scored 0"
            )
        if not result.has_votes:
            votes = [vote for problem in result.problems for vote in problem.votes]
            failures.append(
                f"{result.name}: no maj@k: the first reward function must return 'extracted' for "
                f"every response with an answer, {sum(vote < 0 for vote in votes):,} of "
                f"{len(votes):,} have none (docs/evaluation.md)"
            )
    return sums + failures


def _score_rows(results: Sequence[EvalResult]) -> list[list[str]]:
    rows = []
    for result in results:
        scores = [score for score in result.scores if is_shown(score.name, result.problems)]
        rows += [
            [result.name, score.name, f"{score.value:.2%}", f"{score.low:.2%} … {score.high:.2%}"]
            for score in scores
        ]
        if not result.has_votes:
            rows.append([result.name, f"maj@{result.samples_per_prompt}", "–", "–"])
    return rows


def _sample_rows(results: Sequence[EvalResult]) -> list[list[str]]:
    return [[cell_of(result) for cell_of in _SAMPLE_COLUMNS.values()] for result in results]


def _json_of(result: EvalResult) -> str:
    """One result; each problem on a line of its own."""
    fields = asdict(result)
    problems = ",\n".join(f"      {json.dumps(problem)}" for problem in fields.pop("problems"))
    head = json.dumps(fields, indent=2).removesuffix("\n}")
    return f'{head},\n  "problems": [\n{problems}\n  ]\n}}'
