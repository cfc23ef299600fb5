"""Metrics of a step from its batch and evaluations (docs/metrics.md lists the names)."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from bapo_megatron.types import (
    AGENT_COUNTS,
    EvalResult,
    FinishReason,
    Group,
    RolloutBatch,
    RolloutStats,
)

BEFORE_TRAINING = 0
"""The step of an evaluation before training."""

OLD_METRIC_NAMES = {
    "bapo/clip_low": "clip/low",
    "bapo/clip_high": "clip/high",
    "weight_sync/pushes": "weight_sync/syncs",
    "weight_sync/push_s": "weight_sync/sync_s",
}
"""Metric names of earlier versions, and the current names under which they are read."""

_OF_SAMPLING = (
    *("reward/", "rollout/", "data/", "engines/", "collector/", "mismatch/", "tokens/", "clip/"),
    *("loss/positive_", "loss/negative_", "policy/kl_", "policy/negative_", "policy/effective_"),
)
"""How the names of metrics begin that compare with the sampler, or among responses."""

_EVAL_FIELDS = (
    "answer_found_share",
    "missing_answers",
    "grading_timeouts",
    "grading_errors",
    "environment_errors",
    "comparison_timeouts",
    "response_tokens_mean",
    "response_tokens_median",
    "response_tokens_p95",
    "truncated_share",
    "wall_s",
    "tokens_per_s",
)
"""Fields of an ``EvalResult`` that become metrics of the same name."""


def batch_metrics(batch: RolloutBatch, phase_s: dict[str, float]) -> dict[str, float]:
    """Return a step's metrics other than those of its updates; ``phase_s``: its time by phase."""
    values = _rollout_metrics(batch) | _source_metrics(batch) | _age_metrics(batch)
    values |= {f"time/{name}_s": seconds for name, seconds in phase_s.items()}
    total_s = sum(phase_s.values())
    if total_s > 0:
        tokens = sum(sample.episode_sampled for sample in batch.samples)
        values["throughput/tokens_per_s"] = tokens / total_s
    if batch.stats.generated_tokens and batch.stats.generation_s > 0:
        rate = batch.stats.generated_tokens / batch.stats.generation_s
        values["throughput/generated_tokens_per_s"] = rate
    return values


def without_sampling(values: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that mean something where nothing was sampled."""
    return {n: value for n, value in values.items() if not n.startswith(_OF_SAMPLING)}


def eval_metrics(results: Sequence[EvalResult]) -> dict[str, float]:
    """Return the metrics ``eval/<set>/…`` of every evaluation set."""
    values: dict[str, float] = {}
    for result in results:
        prefix = f"eval/{result.name}"
        for score in result.scores:
            kind, _, size = score.name.partition("@")
            if int(size) < result.samples_per_prompt:
                values[f"{prefix}/{kind}_at_{size}"] = score.value
                continue
            values[f"{prefix}/{kind}_at_k"] = score.value
            values[f"{prefix}/{kind}_at_k_low"] = score.low
            values[f"{prefix}/{kind}_at_k_high"] = score.high
        for name in _EVAL_FIELDS:
            values[f"{prefix}/{name}"] = float(getattr(result, name))
        if not result.has_votes:
            del values[f"{prefix}/answer_found_share"], values[f"{prefix}/missing_answers"]
        for name, mean in result.reward_means.items():
            values[f"{prefix}/reward/{name}"] = mean
    return values


def _rollout_metrics(batch: RolloutBatch) -> dict[str, float]:
    samples = batch.samples
    lengths = [sample.episode_sampled for sample in samples]
    truncated = sum(sample.finish_reason is FinishReason.LENGTH for sample in samples)
    rewards = [[sample.reward for sample in group.samples] for group in batch.groups]
    num_groups, num_samples = len(batch.groups), len(samples)
    components = means_by_name([sample.reward_components for sample in samples])
    per_response = len(batch.sequences) / num_samples
    return {
        "reward/mean": math.fsum(sample.reward for sample in samples) / num_samples,
        "reward/solved_groups": sum(
            all(sample.is_right for sample in group.samples) for group in batch.groups
        )
        / num_groups,
        "reward/mixed_groups": sum(min(group) < max(group) for group in rewards) / num_groups,
        "reward/answer_found_share": sum(sample.answer_found for sample in samples) / num_samples,
        "reward/same_answer_share": batch.stats.same_answer_share,
        "reward/timeouts": float(batch.stats.reward_timeouts),
        "reward/errors": float(batch.stats.reward_errors),
        **{f"reward/{name}": mean for name, mean in components.items()},
        "rollout/response_tokens_mean": sum(lengths) / num_samples,
        "rollout/response_tokens_max": float(max(lengths)),
        "rollout/truncated_share": truncated / num_samples,
        **({"rollout/sequences_per_response": per_response} if per_response > 1 else {}),
        **_episode_metrics(batch),
        **_work_metrics(batch.stats),
    }


def _episode_metrics(batch: RolloutBatch) -> dict[str, float]:
    errors, samples = batch.stats.environment_errors, batch.samples
    if errors is None:
        return {}
    turns = [sample.episode_turns for sample in samples]
    written = [sample.episode_tokens - sample.episode_sampled for sample in samples]
    at_limit = sum(sample.finish_reason is FinishReason.TURNS for sample in samples)
    counts = batch.stats.environment_counts
    calls, forks, divergences, refusals, untrained = (counts.get(n, 0.0) for n in AGENT_COUNTS)
    agents = {
        "rollout/agent_forks_share": forks / max(calls, 1),
        "rollout/agent_divergences": divergences,
        "rollout/agent_refusals": refusals,
        "rollout/agent_untrained_share": untrained / max(calls, 1),
    }
    return {
        "rollout/turns_mean": sum(turns) / len(samples),
        "rollout/turns_max": float(max(turns)),
        "rollout/turn_limit_share": at_limit / len(samples),
        "rollout/environment_tokens_mean": sum(written) / len(samples),
        "rollout/environment_tokens_max": float(max(written)),
        "rollout/environment_errors": float(sum(errors.values())),
        **{f"rollout/environment_errors_{kind}": float(n) for kind, n in errors.items()},
        "rollout/environment_tokens_share": sum(written)
        / max(sum(sample.episode_tokens for sample in samples), 1),
        **(agents if calls or refusals else {}),
        **{
            f"rollout/environment_{name}_per_response": total / len(samples)
            for name, total in counts.items()
            if name not in AGENT_COUNTS
        },
    }


def by_name(records: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the values of each name."""
    values: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.items():
            values.setdefault(name, []).append(value)
    return values


def means_by_name(records: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each name, over the records that have it."""
    return {name: math.fsum(v) / len(v) for name, v in sorted(by_name(records).items())}


def _source_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Return the metrics ``data/<set>/…`` of every training set with a group in the batch."""
    groups_by_source: dict[str, list[Group]] = {}
    for group in batch.groups:
        groups_by_source.setdefault(group.samples[0].prompt.source, []).append(group)
    values = {}
    for source, groups in groups_by_source.items():
        if source:
            rewards = [sample.reward for group in groups for sample in group.samples]
            values[f"data/{source}/reward_mean"] = math.fsum(rewards) / len(rewards)
            values[f"data/{source}/group_share"] = len(groups) / len(batch.groups)
    return values


def _work_metrics(stats: RolloutStats) -> dict[str, float]:
    names = ["generated_tokens", "resumed_samples", "unfinished_samples", "replayed_groups"]
    names += ["equal_reward_groups", "filled_groups", "regenerated_samples", "lost_requests"]
    dropped = stats.dropped_groups
    return {
        **{f"rollout/{name}": float(getattr(stats, name)) for name in names},
        "rollout/dropped_groups": float(sum(dropped.values())),
        **{f"rollout/dropped_{reason}_groups": float(n) for reason, n in dropped.items()},
        "engines/retractions": float(stats.retractions),
        **{f"engines/{name}": value for name, value in stats.engine_load.items()},
        "collector/loop_lag_s": stats.loop_lag_s,
    }


def _age_metrics(batch: RolloutBatch) -> dict[str, float]:
    tokens_by_age: Counter[int] = Counter()
    for sample in batch.samples:
        for span in sample.episode_versions:
            tokens_by_age[batch.version - span.version] += span.num_tokens
    num_tokens = tokens_by_age.total()
    if num_tokens == 0:
        return {}
    ages = sorted(tokens_by_age)
    reached = list(accumulate(tokens_by_age[age] for age in ages))
    stale = sum(count for age, count in tokens_by_age.items() if age > 0)
    return {
        "rollout/stale_token_share": stale / num_tokens,
        "rollout/age_mean": sum(age * n for age, n in tokens_by_age.items()) / num_tokens,
        "rollout/age_p50": float(ages[bisect_left(reached, 0.5 * num_tokens)]),
        "rollout/age_p90": float(ages[bisect_left(reached, 0.9 * num_tokens)]),
        "rollout/age_max": float(ages[-1]),
    }
