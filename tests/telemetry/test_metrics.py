"""Metrics are quotients of global sums, by the documented names."""

from dataclasses import replace

import numpy as np
import pytest

from bapo_megatron.data.staleness import spans_of
from bapo_megatron.telemetry.metrics import batch_metrics, eval_metrics
from bapo_megatron.types import (
    FinishReason,
    Group,
    PromptTokens,
    RolloutBatch,
    RolloutStats,
    Sample,
    VersionSpan,
    WrittenSpan,
)
from tests.data.samples import add_branch, make_batch
from tests.docs.metric_names import unlisted
from tests.evaluation.results import result

AGED_VERSIONS = ((7,), (0, 4, 7, 7), (4, 6), (6, 6, 7))


def _sample(group_id: int, index: int, length: int, reward: float) -> Sample:
    return Sample(
        group_id=group_id,
        index=index,
        prompt=PromptTokens(f"p:{group_id}", np.array([1, 2], np.int32)),
        response_token_ids=np.zeros(length, np.int32),
        behaviour_logprobs=np.zeros(length, np.float32),
        versions=(VersionSpan(0, length),) if length else (),
        finish_reason=FinishReason.STOP if length < 4 else FinishReason.LENGTH,
        reward=reward,
        answer_found=length > 1,
    )


def _batch() -> RolloutBatch:
    groups = (
        Group(0, (_sample(0, 0, 1, 0.0), _sample(0, 1, 4, 1.0))),
        Group(1, (_sample(1, 0, 2, 1.0), _sample(1, 1, 3, 1.0))),
    )
    return RolloutBatch(step=5, version=7, groups=groups, stats=RolloutStats(20, 2.0))


def values_of(batch: RolloutBatch, **phase_s: float) -> dict[str, float]:
    values = batch_metrics(batch, phase_s)
    assert unlisted(name for name in values if not name.startswith(("reward/", "data/"))) == set()
    return values


def test_components_are_means_over_the_samples_that_have_them() -> None:
    batch = _batch()
    terms = [
        {"math": 0.0, "judge": 0.5},
        {"math": 1.0, "overlong": -0.5},
        {"math": 1.0, "judge": 0.25, "judge/clarity": 3.0},
        {"math": 1.0},
    ]
    for sample, components in zip(batch.samples, terms, strict=True):
        sample.reward_components = components

    values = values_of(batch)

    assert values["reward/math"] == 0.75
    assert values["reward/judge"] == 0.375
    assert values["reward/judge/clarity"] == 3.0
    assert values["reward/overlong"] == -0.5
    assert values["reward/errors"] == 0.0
    # A group is solved whatever shaping adds.
    for sample in batch.groups[1].samples:
        sample.reward = 1.0 + 0.1 - 0.7
        sample.reward_components = {"math": 1.0, "format": 0.1, "overlong": -0.7}
    batch.samples[0].reward = 1.5
    batch.samples[0].reward_components = {"math": 0.0, "format": 1.5}
    assert values_of(batch)["reward/solved_groups"] == 0.5


def test_lengths_and_ages_are_those_of_episodes_and_their_sequences_are_counted() -> None:
    assert "rollout/sequences_per_response" not in values_of(_batch())
    batch = _episodes({})
    branch = add_branch(batch.samples[0], (2, 3, 1))
    branch.versions = (VersionSpan(batch.version - 2, 3),)
    plain, values = values_of(_episodes({})), values_of(batch)

    assert values["rollout/sequences_per_response"] == 1.25
    assert values["rollout/response_tokens_mean"] == (1 + 3 + 4 + 2 + 3) / 4
    assert values["rollout/environment_tokens_mean"] == 19 / 4
    assert values["rollout/environment_tokens_share"] == 19 / 32
    assert values["rollout/turns_mean"] == 9 / 4
    # All other tokens are of version 0.
    assert values["rollout/age_mean"] == (10 * 7 + 3 * 2) / 13
    rewards = {name: value for name, value in plain.items() if name.startswith("reward")}
    assert rewards.items() <= values.items()


EPISODE_METRICS = {
    "rollout/turns_mean": 1.75,
    "rollout/turns_max": 3.0,
    "rollout/turn_limit_share": 0.25,
    "rollout/environment_tokens_mean": 4.0,
    "rollout/environment_tokens_max": 11.0,
    "rollout/environment_tokens_share": 16 / 26,
    "rollout/environment_calls_per_response": 1.5,
    "rollout/environment_failures_timeout_per_response": 0.25,
}


def _episodes(errors: dict[str, int] | None) -> RolloutBatch:
    """The same sampled tokens, 1, 4, 2 and 3; one response has two turns, one has three."""
    batch = _batch()
    for number, spans in {1: ((2, 5),), 3: ((1, 10), (12, 1))}.items():
        sample = batch.samples[number]
        sample.written = tuple(WrittenSpan(*span) for span in spans)
        length = len(sample.behaviour_logprobs) + sum(n for _, n in spans)
        sample.response_token_ids = np.zeros(length, np.int32)
    batch.samples[3].finish_reason = FinishReason.TURNS
    counts = {"calls": 6.0, "failures_timeout": 1.0}
    stats = replace(batch.stats, environment_errors=errors, environment_counts=counts)
    return replace(batch, stats=stats)


@pytest.mark.parametrize("errors", [{}, {"timeout": 3, "tokens": 1}])
def test_episodes_are_measured_by_turns_by_what_was_written_and_by_kinds_of_errors(
    errors: dict[str, int],
) -> None:
    values = values_of(_episodes(errors))
    shown = {name: n for name, n in values.items() if "turn" in name or "environment" in name}
    kinds = {f"rollout/environment_errors_{kind}": float(n) for kind, n in errors.items()}
    total = {"rollout/environment_errors": 4.0 if errors else 0.0}
    assert shown == {**EPISODE_METRICS, **total, **kinds}
    none = values_of(_episodes(None))
    assert not [name for name in none if "turn" in name or "environment" in name]


@pytest.mark.parametrize(("calls", "refusals"), [(4.0, 3.0), (0.0, 2.0)])
def test_refused_calls_of_agents_show_even_if_no_other_was_made(
    calls: float, refusals: float
) -> None:
    batch = _episodes(errors={})
    counts = {"agent_calls": calls, "agent_forks": calls / 4, "agent_refusals": refusals}
    values = values_of(replace(batch, stats=replace(batch.stats, environment_counts=counts)))
    assert values["rollout/agent_refusals"] == refusals
    assert values["rollout/agent_forks_share"] == (0.25 if calls else 0.0)
    assert not [name for name in values if name.startswith("rollout/environment_agent")]


def test_rewards_lengths_ages_and_throughput_count_groups_samples_and_sampled_tokens() -> None:
    plain, episodes = _batch(), _episodes(errors={})
    for batch in (plain, episodes):
        for sample, versions in zip(batch.samples, AGED_VERSIONS, strict=True):
            sample.versions = spans_of(versions)

    values = values_of(episodes, train=2.0)

    expected = {
        "reward/mean": 0.75,
        "reward/solved_groups": 0.5,
        "reward/mixed_groups": 0.5,
        "reward/answer_found_share": 0.75,
        "rollout/response_tokens_mean": 2.5,
        "rollout/response_tokens_max": 4.0,
        "rollout/truncated_share": 0.25,  # the limit of turns is none of tokens
        "throughput/tokens_per_s": 5.0,
        "throughput/generated_tokens_per_s": 10.0,
    }
    assert expected.items() <= values.items()
    # Where all was generated beside the step before, there is no rate.
    ahead = replace(episodes, stats=replace(episodes.stats, generated_tokens=0))
    assert "throughput/generated_tokens_per_s" not in values_of(ahead, train=2.0)
    without = values_of(plain, train=2.0)
    assert {name: values[name] for name in without} == without


def test_rewards_are_reported_for_every_data_set_of_the_batch() -> None:
    rewards = {"easy": [[1.0, 1.0], [0.0, 1.0]], "hard": [[0.0, 0.0]], "": [[1.0, 1.0]]}
    groups = []
    for source, of_groups in rewards.items():
        for of_group in of_groups:
            samples = [_sample(len(groups), i, 2, reward) for i, reward in enumerate(of_group)]
            for sample in samples:
                sample.prompt = replace(sample.prompt, source=source)
            groups.append(Group(len(groups), tuple(samples)))
    batch = RolloutBatch(step=0, version=0, groups=tuple(groups))

    values = values_of(batch)

    assert {name: value for name, value in values.items() if name.startswith("data/")} == {
        "data/easy/reward_mean": 0.75,
        "data/easy/group_share": 0.5,
        "data/hard/reward_mean": 0.0,
        "data/hard/group_share": 0.25,
    }


def test_work_metrics_name_every_reason_for_dropping_a_group() -> None:
    values = values_of(make_batch())
    expected = {
        "rollout/replayed_groups": 1.0,
        "rollout/equal_reward_groups": 4.0,
        "rollout/filled_groups": 2.0,
        "rollout/dropped_groups": 5.0,
        "rollout/dropped_stale_groups": 3.0,
        "rollout/dropped_equal_rewards_groups": 2.0,
        "rollout/regenerated_samples": 6.0,
        "rollout/lost_requests": 5.0,
        "engines/retractions": 7.0,
        "engines/running": 2.5,
        "collector/loop_lag_s": 0.25,
    }
    assert {name: values[name] for name in expected} == expected
    assert "rollout/dropped_carried_groups" not in values


@pytest.mark.parametrize(
    ("versions", "ages"),
    [
        # Ages: 0 four times, 1 three times, 3 twice, 7 once.
        (AGED_VERSIONS, {"mean": 1.6, "p50": 1.0, "p90": 3.0, "max": 7.0, "stale": 0.6}),
        (
            [[7], [7] * 4, [7] * 2, [7] * 3],
            dict.fromkeys(("mean", "p50", "p90", "max", "stale"), 0),
        ),
        ([[]] * 4, {}),
    ],
)
def test_ages_are_counted_from_the_batch_over_all_its_tokens(
    versions: list[list[int]], ages: dict[str, float]
) -> None:
    batch = _batch()  # of version 7, with responses of 1, 4, 2 and 3 tokens
    for sample, of_tokens in zip(batch.samples, versions, strict=True):
        sample.versions = spans_of(of_tokens)
    values = values_of(batch)
    names = {"stale": "rollout/stale_token_share"}
    shown = {n: v for n, v in values.items() if "/age_" in n or "stale" in n}
    assert shown == {names.get(n, f"rollout/age_{n}"): value for n, value in ages.items()}


def test_an_evaluation_reports_its_scores_with_intervals_under_the_set_s_name():
    scored = result({"a:0": ["2", "2", "3", ""], "a:1": ["5", "2", "2", "2"]}, name="sums")

    values = eval_metrics([scored])
    assert unlisted(values) == set()

    by_name = {score.name: score for score in scored.scores}
    assert values["eval/sums/avg_at_k"] == by_name["avg@4"].value == 0.625
    assert values["eval/sums/avg_at_k_low"] == by_name["avg@4"].low == 0.5
    assert values["eval/sums/avg_at_k_high"] == by_name["avg@4"].high == 0.75
    assert values["eval/sums/pass_at_k"] == values["eval/sums/maj_at_k"] == 1.0
    assert values["eval/sums/pass_at_1"] == 0.625
    assert values["eval/sums/pass_at_2"] == pytest.approx((5 / 6 + 1) / 2)
    assert "eval/sums/maj_at_2" in values
    assert values["eval/sums/missing_answers"] == 1
    assert values["eval/sums/answer_found_share"] == 7 / 8
    assert values["eval/sums/response_tokens_p95"] == 10
    assert values["eval/sums/tokens_per_s"] == 80
    assert all(name.startswith("eval/sums/") for name in values)
