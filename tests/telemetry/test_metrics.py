"""Metrics are quotients of global sums, by the documented names."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from rich.table import Table
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bapo_megatron.config.schema import LogConfig
from bapo_megatron.data.staleness import spans_of
from bapo_megatron.telemetry.console import ProgressLine, uncut_console
from bapo_megatron.telemetry.metrics import (
    BEFORE_TRAINING,
    eval_metrics,
    step_metrics,
)
from bapo_megatron.telemetry.sinks import MetricsSinks, read_metrics
from bapo_megatron.types import (
    FinishReason,
    Group,
    PromptTokens,
    RolloutBatch,
    RolloutStats,
    Sample,
    StepMetrics,
    VersionSpan,
    WrittenSpan,
)
from tests.docs.metric_names import unlisted
from tests.evaluation.results import result

WORK = (
    "replayed_groups",
    "equal_reward_groups",
    "filled_groups",
    "dropped_groups",
    "dropped_stale_groups",
    "dropped_surplus_groups",
    "regenerated_samples",
    "lost_requests",
)

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
    batch.samples[2].reward, batch.samples[3].reward = 1.0, 1.0

    values = step_metrics(batch, {}, 0.1, {}).values

    assert values["reward/math"] == 0.75
    assert values["reward/judge"] == 0.375
    assert values["reward/judge/clarity"] == 3.0
    assert values["reward/overlong"] == -0.5
    assert values["reward/errors"] == 0.0


def test_a_group_is_solved_whatever_shaping_adds() -> None:
    batch = _batch()
    for sample in batch.groups[1].samples:
        sample.reward = 1.0 + 0.1 - 0.7
        sample.reward_components = {"math": 1.0, "format": 0.1, "overlong": -0.7}
    batch.samples[0].reward = 1.5
    batch.samples[0].reward_components = {"math": 0.0, "format": 1.5}

    assert step_metrics(batch, {}, 0.1, {}).values["reward/solved_groups"] == 0.5


def _batch() -> RolloutBatch:
    groups = (
        Group(0, (_sample(0, 0, 1, 0.0), _sample(0, 1, 4, 1.0))),
        Group(1, (_sample(1, 0, 2, 1.0), _sample(1, 1, 3, 1.0))),
    )
    return RolloutBatch(step=5, version=7, groups=groups, stats=RolloutStats(20, 2.0))


def test_rollout_metrics_count_samples_and_groups() -> None:
    values = step_metrics(_batch(), {}, 0.0, {}).values
    assert unlisted(values) == set()
    assert values["reward/mean"] == 0.75
    assert values["reward/solved_groups"] == 0.5
    assert values["reward/mixed_groups"] == 0.5
    assert values["reward/answer_found_share"] == 0.75
    assert values["rollout/response_tokens_mean"] == 2.5
    assert values["rollout/response_tokens_max"] == 4.0
    assert values["rollout/truncated_share"] == 0.25


EPISODE_METRICS = {
    "rollout/turns_mean": 1.75,
    "rollout/turns_max": 3.0,
    "rollout/turn_limit_share": 0.25,
    "rollout/environment_tokens_mean": 4.0,
    "rollout/environment_tokens_max": 11.0,
    "rollout/environment_errors": 0.0,
}
"""The metrics of ``_episodes`` without errors."""


def _episodes(errors: dict[str, int] | None) -> RolloutBatch:
    """The same sampled tokens, 1, 4, 2 and 3; one response has two turns, one has three."""
    batch = _batch()
    for number, spans in {1: ((2, 5),), 3: ((1, 10), (12, 1))}.items():
        sample = batch.samples[number]
        sample.written = tuple(WrittenSpan(*span) for span in spans)
        length = len(sample.behaviour_logprobs) + sum(n for _, n in spans)
        sample.response_token_ids = np.zeros(length, np.int32)
    batch.samples[3].finish_reason = FinishReason.TURNS
    return replace(batch, stats=replace(batch.stats, environment_errors=errors))


def test_episodes_are_measured_by_turns_and_by_what_was_written() -> None:
    values = step_metrics(_episodes(errors={}), {}, 0.0, {}).values

    assert {name: values[name] for name in EPISODE_METRICS} == EPISODE_METRICS
    assert not any(name.endswith("_errors") for name in values.keys() - EPISODE_METRICS.keys())


def test_environment_errors_are_reported_by_kind() -> None:
    values = step_metrics(_episodes(errors={"timeout": 3, "tokens": 1}), {}, 0.0, {}).values
    assert unlisted(values) == set()

    assert values["rollout/environment_errors"] == 4.0
    assert values["rollout/environment_errors_timeout"] == 3.0
    assert values["rollout/environment_errors_tokens"] == 1.0


def test_lengths_ages_and_throughput_count_sampled_tokens() -> None:
    plain, episodes = _batch(), _episodes(errors={})
    for batch in (plain, episodes):
        for sample, versions in zip(batch.samples, AGED_VERSIONS, strict=True):
            sample.versions = spans_of(versions)

    values = step_metrics(episodes, {}, 0.0, {"train": 2.0}).values

    assert values["rollout/response_tokens_mean"] == 2.5
    assert values["rollout/response_tokens_max"] == 4.0
    assert values["throughput/tokens_per_s"] == 5.0
    assert values["rollout/truncated_share"] == 0.25  # the limit of turns is none of tokens
    without = step_metrics(plain, {}, 0.0, {"train": 2.0}).values
    assert {name: values[name] for name in without} == without


def test_a_run_without_an_environment_reports_nothing_about_episodes() -> None:
    values = step_metrics(_episodes(errors=None), {}, 0.0, {}).values

    assert not values.keys() & EPISODE_METRICS.keys()
    assert not any(name.startswith("rollout/environment") for name in values)


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

    values = step_metrics(batch, {}, lr=0.0, phase_s={}).values

    assert {name: value for name, value in values.items() if name.startswith("data/")} == {
        "data/easy/reward_mean": 0.75,
        "data/easy/group_share": 0.5,
        "data/hard/reward_mean": 0.0,
        "data/hard/group_share": 0.25,
    }


def test_work_metrics_name_every_reason_for_dropping_a_group() -> None:
    stats = RolloutStats(
        replayed_groups=2,
        equal_reward_groups=3,
        filled_groups=1,
        dropped_groups={"stale": 4, "surplus": 1},
        regenerated_samples=5,
        lost_requests=6,
        retractions=7,
        engine_load={"running": 2.5},
        loop_lag_s=0.5,
    )
    values = step_metrics(replace(_batch(), stats=stats), {}, 0.0, {}).values
    assert unlisted(values) == set()
    assert {name: values[f"rollout/{name}"] for name in WORK} == {
        "replayed_groups": 2.0,
        "equal_reward_groups": 3.0,
        "filled_groups": 1.0,
        "dropped_groups": 5.0,
        "dropped_stale_groups": 4.0,
        "dropped_surplus_groups": 1.0,
        "regenerated_samples": 5.0,
        "lost_requests": 6.0,
    }
    assert (values["engines/retractions"], values["collector/loop_lag_s"]) == (7.0, 0.5)
    assert values["engines/running"] == 2.5
    assert "rollout/dropped_carried_groups" not in values


def test_ages_are_counted_from_the_batch_over_all_its_tokens() -> None:
    batch = _batch()  # of version 7, with responses of 1, 4, 2 and 3 tokens
    for sample, versions in zip(batch.samples, AGED_VERSIONS, strict=True):
        sample.versions = spans_of(versions)
    values = step_metrics(batch, {}, 0.0, {}).values
    # Ages: 0 four times, 1 three times, 3 twice, 7 once.
    assert values["rollout/stale_token_share"] == 0.6
    assert values["rollout/age_mean"] == 1.6
    assert values["rollout/age_p50"] == 1.0
    assert values["rollout/age_p90"] == 3.0
    assert values["rollout/age_max"] == 7.0


def test_a_fresh_batch_has_no_stale_tokens() -> None:
    batch = _batch()
    for sample in batch.samples:
        sample.versions = (VersionSpan(7, len(sample.response_token_ids)),)
    values = step_metrics(batch, {}, 0.0, {}).values
    assert values["rollout/stale_token_share"] == 0.0
    assert values["rollout/age_max"] == 0.0


def test_a_batch_of_empty_responses_has_no_ages() -> None:
    groups = (Group(0, (_sample(0, 0, 0, 0.0), _sample(0, 1, 0, 1.0))),)
    values = step_metrics(RolloutBatch(0, 0, groups), {}, 0.0, {}).values
    assert not any(name.startswith("rollout/age") for name in values)


def test_sinks_drop_rows_that_a_resumed_run_makes_again(tmp_path) -> None:
    config = LogConfig(console=False, tensorboard=False)
    for first, reward in ((0, 0.1), (3, 0.9)):
        sinks = MetricsSinks(tmp_path, "run", config, first_step=first, total_steps=4)
        for step in range(max(first, 1), 5):
            sinks.write(StepMetrics(step, {"reward/mean": reward, "x": math.nan}))
        sinks.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["reward/mean"]) for row in rows] == [
        (1, 0.1),
        (2, 0.1),
        (3, 0.9),
        (4, 0.9),
    ]
    assert "x" not in rows[0]


def test_a_run_that_begins_anew_drops_the_row_before_training_too(tmp_path) -> None:
    config = LogConfig(console=False, tensorboard=False)
    for reward in (0.1, 0.9):
        sinks = MetricsSinks(tmp_path, "run", config, first_step=0, total_steps=4)
        sinks.write(StepMetrics(BEFORE_TRAINING, {"reward/mean": reward}))
        sinks.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows == [{"step": 0, "reward/mean": 0.9}]


def test_a_torn_last_line_does_not_block_a_resumed_run(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a"')
    config = LogConfig(console=False, tensorboard=False)
    sinks = MetricsSinks(tmp_path, "run", config, first_step=2, total_steps=4)
    sinks.write(StepMetrics(2, {"a": 2.0}))
    sinks.close()
    assert read_metrics(path) == [{"step": 1, "a": 1}, {"step": 2, "a": 2.0}]


def test_a_run_of_an_earlier_version_goes_on_under_the_present_names(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "bapo/clip_low": 0.6, "bapo/clip_high": 1.2, "bapo/x": 1}\n')
    assert read_metrics(path) == [{"step": 1, "clip/low": 0.6, "clip/high": 1.2, "bapo/x": 1}]
    config = LogConfig(console=False, tensorboard=False)
    sinks = MetricsSinks(tmp_path, "run", config, first_step=2, total_steps=4)
    sinks.write(StepMetrics(2, {"clip/low": 0.7}))
    sinks.close()
    assert [row["clip/low"] for row in read_metrics(path)] == [0.6, 0.7]
    assert "bapo/clip" not in path.read_text()


def test_every_sink_counts_finished_steps(tmp_path, capsys) -> None:
    sinks = MetricsSinks(tmp_path, "run", LogConfig(), first_step=0, total_steps=6)
    for step in (BEFORE_TRAINING, 1, 6):
        sinks.write(StepMetrics(step, {"reward/mean": 0.5}))
    sinks.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 6]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [0, 1, 6]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "1/6", "6/6"]


def test_rows_of_tables_are_whole_where_output_is_no_terminal(capsys, monkeypatch) -> None:
    table = Table("key", "meaning")
    table.add_row("a", "word " * 60)
    for columns, num_lines in ((None, 5), ("80", 9)):
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns:
            monkeypatch.setenv("COLUMNS", columns)
        uncut_console().print(table)
        assert len(capsys.readouterr().out.splitlines()) == num_lines


def test_progress_in_a_log_is_one_line_without_markup(capsys, monkeypatch) -> None:
    monkeypatch.setattr("bapo_megatron.telemetry.console._PLAIN_INTERVAL_S", 0.0)
    for line in ("starting http://[fe80::1]:30000", "grading runs/[/a]/b", "a word " * 30 + "end"):
        ProgressLine().update(line)
        assert capsys.readouterr().err == f"{line}\n"


def test_a_broken_metrics_line_is_named(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": \n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not valid JSON .*; remove the"):
        read_metrics(path)


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
