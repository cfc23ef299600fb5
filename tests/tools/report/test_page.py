"""What the page is made of, without a browser."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.data.columns import DumpError
from bapo_megatron.data.dump import read_batch, write_batch
from bapo_megatron.data.token_dump import read_token_dump, token_dump_path, write_token_dump
from bapo_megatron.evaluation.results import write_results
from bapo_megatron.telemetry.run_dir import Start
from bapo_megatron.tools.report.checks import CHECKS, Finding, findings_of
from bapo_megatron.tools.report.figures import (
    PANELS,
    metric_curves,
    panels_of,
    phases_of,
    progress_of,
)
from bapo_megatron.tools.report.overview import (
    card_of,
    difference_table,
    evaluation_table,
    seed_table,
)
from bapo_megatron.tools.report.page import page_data, render
from bapo_megatron.tools.report.rollouts import Pieces, find_tokenizer, sample_rollouts
from bapo_megatron.tools.report.runs import RunRecord, events_of, group_runs, read_runs
from bapo_megatron.types import VersionSpan
from tests.data.samples import add_branch
from tests.evaluation.results import result
from tests.launch import REPOSITORY
from tests.tools.report.made_runs import RATIOS, SCRIPT, SECRET, WORDS, make_run


def run_of(*rows: dict[str, float], name: str = "a", **settings: object) -> RunRecord:
    return RunRecord(Path(name), name, tuple(rows), settings)


def findings(*rows: dict[str, float]) -> list[Finding]:
    return findings_of(run_of(*rows))


def card(*runs: RunRecord) -> dict[str, Any]:
    """The card of the only group."""
    (group,) = group_runs(runs)[0]
    return card_of(group)


def panels(*runs: RunRecord) -> list[dict[str, Any]]:
    return panels_of(group_runs(runs)[0])


def curves(run: RunRecord) -> dict[str, dict[str, list[float]]]:
    """The values of each curve, by panel and name."""
    return {p["title"]: {c["name"]: c["y"] for c in p["curves"]} for p in panels(run)}


def made(path: Path, **changes: Any) -> RunRecord:
    (run,) = read_runs([make_run(path, **changes)])
    return run


def series(metric: str, values: list[float]) -> list[dict[str, float]]:
    return [{"step": step, metric: value} for step, value in enumerate(values, start=1)]


def test_seeds_of_a_configuration_are_one_band_with_mean_and_range() -> None:
    same = [
        run_of({"step": 1, "reward/mean": value}, **{"seed": n, "run_dir": n, "train.steps": 1})
        for n, value in enumerate((1, 2, 6))
    ]
    groups, differing = group_runs(same)
    assert (len(groups), differing) == (1, [])
    curve = panels(*same)[0]["curves"][0]
    assert (curve["y"], curve["low"], curve["high"]) == ([3.0], [1.0], [6.0])
    # One seed is further than the others: its own values are no mean.
    same[2] = replace(same[2], rows=(*same[2].rows, {"step": 2, "reward/mean": 9.0}))
    assert panels(*same)[0]["curves"][0]["x"] == [1]


def test_runs_of_other_settings_are_groups_of_their_own() -> None:
    old = {"algorithm.objective": "bapo", "reward.overlong": None, "seed": 0}
    new = {**old, "seed": 1}
    clip = {**new, "algorithm.objective": "clip"}
    shaped = {"algorithm.objective": "bapo", "reward.overlong.penalty": 1.0}
    two_sets = {**old, "data.train.0.path": "a", "data.train.1.path": "b"}
    one_set = {**old, "data.train.0.path": "a"}
    names = ["bapo-0", "bapo-1", "clip-0", "shaped", "two", "one"]
    settings = [old, new, clip, shaped, two_sets, one_set]
    runs = [run_of({"step": 1}, name=n, **s) for n, s in zip(names, settings, strict=True)]
    groups, differing = group_runs(runs[:4])
    assert [group.label for group in groups] == ["bapo (2 seeds)", "clip-0", "shaped"]
    assert set(differing) == {"algorithm.objective", "reward.overlong.penalty"}
    assert len(group_runs(runs[4:])[0]) == 2
    first, second = (
        replace(runs[1], name=f"k={k}", settings={**new, "optimizer.k": k}) for k in (1, 2)
    )
    table = difference_table(*group_runs([runs[0], first, second]))
    assert table["rows"] == [["optimizer.k", "none", "1", "2"]]


def test_a_seed_that_a_group_has_already_begins_another_one(tmp_path: Path) -> None:
    names = {"a-0": 0, "again": 0, "a-1": 1}
    runs = [scored(tmp_path / name, 5, seed) for name, seed in names.items()]
    groups, differing = group_runs(runs)
    assert [(g.label, len(g.runs)) for g in groups] == [("a (2 seeds)", 2), ("again", 1)]
    assert differing == []
    assert [row[3] for row in seed_table(groups)["rows"]] == [2]


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (("a-seed0", "a-seed1"), "a (2 seeds)"),
        (("b/s0", "b/s1"), "b (2 seeds)"),
        (("tests10", "tests11"), "tests (2 seeds)"),
        (("seed0", "seed1"), "seed0 (2 seeds)"),
        (("x", "y"), "x (2 seeds)"),
    ],
)
def test_a_group_is_called_what_the_names_of_its_runs_share(
    names: tuple[str, str], label: str
) -> None:
    runs = [run_of({"step": 1}, name=n, **{"train.steps": 1, "seed": n}) for n in names]
    (group,) = group_runs(runs)[0]
    assert group.label == label


def scored(path: Path, num_right: int, seed: int, step: int = 4, **settings: object) -> RunRecord:
    """A run of which so many of ten problems are right after a step."""
    answers = {f"a:{row}": ["2" if row < num_right else "3"] for row in range(10)}
    scores = [result(answers, name="heldout")]
    write_results(scores, path / "eval" / f"step_{step:06d}.json")
    return RunRecord(
        path, path.name, ({"step": step},), {"train.steps": 1, "seed": seed, **settings}
    )


def test_scores_have_intervals_over_seeds_and_differences_are_paired_by_seed(
    tmp_path: Path,
) -> None:
    scores = {"bapo": (5, 6, 7), "clip": (6, 8, 7), "late": (6, 8), "none": (9,)}
    runs = [
        scored(
            *(tmp_path / f"{name}-{seed}", num_right, seed, 4 + (name == "late")),
            **{"algorithm.objective": name},
        )
        for name, values in scores.items()
        for seed, num_right in enumerate(values)
    ]
    table = seed_table(group_runs(runs)[0])
    # Both standard deviations are 0.1, so half an interval is 4.3027 × 0.1 / √3; t of the mean
    # difference of 0.1 is √3 with two degrees, so p is 0.2254.
    assert table["rows"] == [
        ["bapo (3 seeds)", "heldout", 4, 3, "60.0% (35.2% … 84.8%)", ""],
        [
            *("clip (3 seeds)", "heldout", 4, 3, "70.0% (45.2% … 94.8%)"),
            "+10.0 (−14.8 … +34.8), p = 0.23",
        ],
        ["late (2 seeds)", "heldout", 5, 2, "70.0% (0.0% … 100.0%)", ""],
    ]
    assert seed_table(group_runs(runs[-1:])[0])["rows"] == []


def test_evaluations_on_other_problems_of_the_same_name_are_not_compared(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a")
    for name, problem in (("start", "a:0"), ("step_000006", "b:0")):
        write_results([result({problem: ["2"]}, name="heldout")], path / "eval" / f"{name}.json")
    table = evaluation_table(read_runs([path]))
    assert table["headings"][3:7:3] == ["k", "change since the first, pp"]
    assert [row[3:7:3] for row in table["rows"]] == [[1, ""], [1, "other problems"]]


def test_runs_are_named_by_as_much_of_their_paths_as_tells_them_apart(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "x/a"), make_run(tmp_path / "y/a")])
    assert [run.name for run in runs] == ["x/a", "y/a"]
    with pytest.raises(ValueError, match="given twice"):
        read_runs([tmp_path / "x/a", tmp_path / "x/../x/a"])


def test_a_missing_or_empty_run_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metrics\.jsonl: no such file"):
        read_runs([tmp_path])
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match=r"metrics\.jsonl: no step"):
        read_runs([tmp_path])


def test_weight_syncs_evaluations_faults_and_restarts_are_events() -> None:
    run = run_of(
        {"step": 1, "weight_sync/syncs": 1.0, "weight_sync/sync_s": 0.5},
        {"step": 2, "reward/errors": 3.0},
        {"step": 3, "eval/heldout/avg_at_k": 0.5},
    )
    starts = (
        Start("2026-11-24T00:00:00+00:00", step, commit, {}, "node", 1)
        for step, commit in ((0, "1f"), (2, "1f"), (2, "2e"))
    )
    events = events_of(replace(run, starts=tuple(starts)))
    assert [(event.kind, event.step, event.text) for event in events] == [
        ("sync", 1, "weight sync, 0.50 s"),
        ("fault", 2, "reward functions failed on 3 responses"),
        ("evaluation", 3, "evaluation: heldout 50.0%"),
        ("restart", 3, "resumed after 2 finished steps"),
        ("restart", 3, "resumed after 2 finished steps; commit 2e, was 1f"),
    ]


@pytest.mark.parametrize(
    ("metric", "values", "level", "text"),
    [
        ("train/updates", [1, 0, 1], "fault", "step 2) made no update (2 of 2 in the run)"),
        ("reward/mean", [0, 0, 0], "fault", "The mean reward was 0 in every step"),
        ("mismatch/logprob_abs_mean", [1e-6, 0.4, 0.3], "fault", "in 2 of 3 steps (steps 2, 3)"),
        ("mismatch/logprob_abs_mean", [1e-6, 0.01], "fault", "since the first value was 1e-06"),
        ("mismatch/logprob_abs_mean", [0.2, 0.3], "fault", "it likely computes differently"),
        ("weight_sync/logprob_difference", [0.06], "fault", "After a weight sync"),
        ("reward/mean", [0.5] * 10 + [0.1] * 5, "fault", "0.500 (mean of steps 1 to 3) to 0.1"),
        ("policy/grad_norm_max", [1] * 5 + [50, 12, 11], "caution", "50 times its median"),
        ("policy/entropy", [1, 0.5, 0.05, 0.05, 0.05], "caution", "token (step 1) to 0.05 (mean"),
        ("policy/kl_behaviour", [0.01, 0.3], "caution", "The learning rate is too high"),
        ("policy/effective_sample_share", [0.5, 0.1, 0.3, 0.4], "caution", "as 10.0% of their"),
        ("policy/negative_doubled_share", [0.01, 0.03, 0.02], "caution", "3.0% of the tokens with"),
        ("rollout/masked_token_share", [0.1, 0.3], "caution", "1 of 2 steps (step 2)"),
        ("rollout/age_p90", [2] * 6 + [40] * 6, "caution", "(mean of steps 7 to 12)"),
        ("rollout/truncated_share", [0.5], "caution", "50% of the responses are truncated (step"),
        ("reward/answer_found_share", [0.9, 0.2, 0.2, 0.2], "caution", "Only 20% of the responses"),
        ("reward/same_answer_share", [0.3, 0.9], "caution", "60% of the solved prompts have one"),
        ("reward/errors", [0, 2], "caution", "(step 2), reward functions failed on 2 responses"),
    ],
)
def test_checks_find_runs_that_go_wrong(
    metric: str, values: list[float], level: str, text: str
) -> None:
    (finding,) = findings(*series(metric, values))
    assert finding.level == level
    assert text in finding.text


def searched(entropy: list[float], exhausted: list[float]) -> list[dict[str, float]]:
    """Steps with an entropy and a share of searches that ended at both maxima."""
    return [
        {"step": step, "policy/entropy": value, "bapo/exit_exhausted_share": share}
        for step, (value, share) in enumerate(zip(entropy, exhausted, strict=True), start=1)
    ]


RISING = [0.5] * 20 + [0.5 + 0.05 * n for n in range(20)]


@pytest.mark.parametrize(
    ("entropy", "exhausted", "is_found"),
    [
        (RISING, [0.3] * 20 + [1.0] * 20, True),
        (RISING, [0.3] * 20 + [1.0, 0.85] * 10, True),
        (RISING, [1.0] * 20 + [0.3] * 20, False),  # the bounds have room when it rises
        (RISING, [0.6] * 40, False),
        ([0.5 + 0.01 * n for n in range(40)], [1.0] * 40, False),  # a slow rise
        (RISING[::-1], [1.0] * 40, False),
        (RISING[20:29], [1.0] * 9, False),  # too few steps
    ],
)
def test_entropy_that_rises_while_bounds_are_at_their_maxima_is_found(
    entropy: list[float], exhausted: list[float], is_found: bool
) -> None:
    found = findings(*searched(entropy, exhausted))
    assert [finding.level for finding in found] == ["caution"] * is_found
    for finding in found:
        assert "BAPO's searches ended at both maxima" in finding.text
        assert finding.panel == "Policy entropy"
        assert 20 <= finding.steps[0] <= 31


def test_the_mismatch_of_a_rounded_sampler_is_explained() -> None:
    rows = series("mismatch/logprob_abs_mean", [0.2, 0.3])
    (finding,) = findings_of(run_of(*rows, **{"rollout.local.sampling_bits": 4}))
    assert finding.level == "caution"
    assert finding.text.endswith("Check the engine: it samples with weights rounded to 4 bits.")


def test_every_check_says_in_how_many_steps_it_was_measured() -> None:
    rows = [{"step": n, "reward/mean": 0.1 * n, "data/sums/reward_mean": 0.5} for n in range(4)]
    rows[1]["mismatch/logprob_abs_mean"] = 3e-7

    def result(name: str) -> list[str]:
        check = next(check for check in CHECKS if check.name == name)
        return list(check.result(run_of(*rows))[1:])

    assert result("constant reward") == ["passed", "3 of 3"]
    assert result("falling reward") == ["not measured", "3 of 3"]
    assert result("data set without reward") == ["not measured", "0 of 3"]
    assert result("engine–trainer mismatch") == ["passed in few steps", "1 of 3"]
    rows[2]["mismatch/logprob_abs_mean"] = 0.3
    assert result("engine–trainer mismatch")[0] == "found"


def test_a_finding_names_a_panel_that_exists_and_how_to_group_its_rollouts() -> None:
    assert {check.panel for check in CHECKS} <= {panel.title for panel in PANELS}
    row = {"step": 1, "data/sums/reward_mean": 0.5, "data/words/reward_mean": 0.0}
    (finding,) = findings(row)
    assert "'words' got 0" in finding.text
    assert (finding.panel, finding.rollouts) == ("Reward by data set", "source")


@pytest.mark.parametrize(
    "rows",
    [
        series("mismatch/logprob_abs_mean", [0.01, 0.02, 0.03]),  # bfloat16
        series("policy/grad_norm_max", [1] * 8 + [50]),
        series("policy/effective_sample_share", [0.9, 0.4, 0.6, 0.4]),
        series("train/skipped_updates", [0, 2]),  # all rewards of their groups were equal
        [  # a hard set that improves
            {"step": n, "data/easy/reward_mean": 0.9, "data/hard/reward_mean": 0.01 * n}
            for n in range(1, 13)
        ],
    ],
)
def test_checks_are_silent_about_what_healthy_runs_do(rows: list[dict[str, float]]) -> None:
    assert findings(*rows) == []


def test_checks_are_silent_about_a_healthy_run() -> None:
    (run,) = read_runs([REPOSITORY / "examples/demo_grpo"])
    assert len(run.steps) == 24
    assert findings_of(run) == []


def test_a_data_set_with_wrong_answers_is_found_while_another_one_learns() -> None:
    rows = [
        {"step": n, "data/right/reward_mean": 0.3 + 0.02 * n, "data/shifted/reward_mean": 0.04}
        for n in range(1, 13)
    ]
    (finding,) = findings(*rows)
    assert finding.level == "fault"
    for words in (
        "'shifted' stays low, 0.04 (mean of steps 1 to 4) and 0.04 (mean of steps 9 to 12)",
        "'right' goes from 0.35 to 0.51: its answers or its reward function are likely wrong",
    ):
        assert words in finding.text
    assert list(curves(run_of(*rows))["Reward by data set"]) == ["right", "shifted"]


def test_the_card_has_updates_that_were_possible_figures_of_the_last_step_and_versions() -> None:
    rows = [
        {
            **{
                "step": n,
                "train/updates": 4 - n,
                "train/skipped_updates": n,
                "reward/mean": 0.1 * n,
            },
            **{"weight_sync/syncs": n, "weight_sync/bytes": 1_200_000 * n},
        }
        for n in (1, 2)
    ]
    start = Start("2026-11-24T00:00:00+00:00", 0, "1f", {"torch": "2.13"}, "node", 1)
    shown = card(replace(run_of(*rows, **{"train.steps": 1}), starts=(start,)))
    figures = dict(zip(shown["headings"], shown["rows"][0], strict=True))
    assert figures["updates"] == "5 of 8"
    assert figures["reward, last step"] == "0.200"
    assert figures["per weight sync"] == "1.2 MB"
    assert shown["settings"]["rows"] == [("commit", "1f"), ("torch", "2.13"), ("train.steps", "1")]


def test_the_first_words_name_what_a_run_adds_to_plain_training() -> None:
    plain = {"rollout.environment": "single_turn", "model.lora.rank": 0, "parallel.expert": 1}
    added = {
        "model.lora.rank": 16,
        "model.lora.alpha": 24.0,
        "rollout.agent": ["python", "own/agent.py"],
        "rollout.environment": "python_tool",
        "algorithm.distillation.teacher.path": "/home/me/teacher",
        "algorithm.router_replay": "rollout",
    }

    def words(settings: dict[str, Any], **metrics: float) -> list[str]:
        return card(run_of({"step": 1, **metrics}, **settings))["words"].split(" · ")

    assert len(words(plain)) == 8
    assert words(plain, **{"router/load_mean": 1.2}) == [*words(plain), "parallel.expert 1"]
    assert words(plain | added)[8:] == [
        "model.lora.rank 16",
        "rollout.environment python_tool",
        "rollout.agent python agent.py",
        "algorithm.distillation.teacher.path teacher",
        "algorithm.router_replay rollout",
        "adapters on all linears of the layers, α/r = 1.5",
    ]
    targets = {"model.lora.targets": ["q_proj", "o_proj"]}
    assert words(plain | added | targets)[-1] == "adapters on q_proj, o_proj, α/r = 1.5"


def test_turns_errors_divergences_and_what_reward_functions_return_have_panels() -> None:
    row = {
        **{"step": 1, "rollout/turns_mean": 2.0, "rollout/turns_max": 3.0},
        **{"rollout/environment_errors": 1.0, "reward/errors": 1.0, "reward/math": 0.5},
        **{"reward/style": 4.0, "reward/style/words": 30.0, "reward/style/used_share": 0.5},
        **{"kl/teacher": 0.5, "kl/reference": 0.25},
        **{"lora/attention/change_ratio": 0.01, "lora/experts/change_ratio": 0.02},
        **{"lora/attention/a_norm": 3.0, "lora/attention/b_norm": 0.5},
        **{"loss/demonstrations": 0.125, "heldout/chat/loss": 1.5, "heldout/chat/perplexity": 4.5},
    }
    assert curves(run_of(row)) == {
        "Reward functions": {"math": [0.5], "style": [4.0]},
        "reward/style/used_share": {"style/used_share": [0.5]},
        "reward/style/words": {"style/words": [30.0]},
        "Turns": {"mean": [2.0], "largest": [3.0]},
        "Environment errors": {"errors": [1.0]},
        "KL divergence": {"reference": [0.25], "teacher": [0.5]},
        "Adapters: change of the weights": {"attention": [0.01], "experts": [0.02]},
        "Adapters: norms of A and B": {"A, attention": [3.0], "B, attention": [0.5]},
        "Loss": {"demonstrations": [0.125]},
        "Held-out demonstrations": {"chat": [1.5]},
    }
    one = {"step": 1, "reward/math": 0.5, **{f"reward/math/m{n}": 2.0 for n in range(20)}}
    assert len(panels(run_of(one))) == 8


def test_a_score_on_the_card_says_of_how_many_responses_it_is_the_mean(tmp_path: Path) -> None:
    four = result({"a:0": ["2", "2", "3", "4"]}, name="heldout")
    run = made(tmp_path / "a")
    write_results([four], run.path / "eval" / "step_000006.json")
    labels = card(run)["headings"][3:5]
    assert labels == ["heldout avg@4, first", "heldout avg@4, last (95% interval)"]


def test_checks_have_a_column_for_every_seed() -> None:
    rows = series("reward/mean", [0.1, 0.2, 0.3])
    shown = card(*(run_of(*rows, name=f"a-{n}", seed=n, **{"train.steps": 3}) for n in (0, 1)))
    assert shown["checks"]["headings"] == ["check", "a-0", "a-1"]
    assert shown["checks"]["rows"][:2] == [
        ["constant reward", *["passed, 3 of 3 steps"] * 2],
        ["data set without reward", *["not measured, 0 of 3 steps"] * 2],
    ]
    assert len(shown["results"]) == 38


def test_progress_sums_the_tokens_and_prompts_that_a_run_had_used_at_each_step() -> None:
    start, *steps = series("train/trained_tokens", [7.0, 100.0, 50.0])
    rows = [{**start, "step": 0}, {**steps[0], "step": 1}, {**steps[1], "step": 2}]
    assert progress_of(run_of(*rows, **{"rollout.groups_per_step": 4})) == {
        "step": [0, 1, 2],
        "trained tokens": [0, 100, 150],
        "prompts": [0, 4, 8],
    }


def test_any_metric_has_curves_and_all_together_are_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [{"step": n, "reward/own": 0.5 * n, "loss/policy": 1.0} for n in range(1, 41)]
    (group,) = group_runs([run_of(*rows)])[0]
    curves = metric_curves([group])
    assert list(curves) == ["loss/policy", "reward/own"]
    (curve,) = curves["reward/own"]
    assert (len(curve["x"]), curve["y"][:3]) == (40, [0.5, 1.0, 1.5])
    monkeypatch.setattr("bapo_megatron.tools.report.figures._ALL_NUMBERS", 80)
    (curve,) = metric_curves([group])["reward/own"]
    assert curve["x"] == [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37, 39]


def test_phases_that_took_no_time_are_left_out(tmp_path: Path) -> None:
    phases = phases_of(made(tmp_path / "a"))["phases"]
    assert [phase["name"] for phase in phases] == ["training", "rollout"]


def test_ratios_come_from_the_token_dump_by_group_and_index(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    shown = sample_rollouts(run, find_tokenizer(run), 1e6)
    first, *others = shown["samples"]
    assert first["ratios"] == RATIOS
    assert [sample["right"] for sample in shown["samples"]] == [False, True] * 2
    assert [other["ratios"] for other in others] == [[1.0] * 4, None, None]
    assert shown["ratios"].startswith("2 of 4 responses")
    pieces = [shown["pieces"][piece][1] for piece in first["pieces"]]
    assert pieces == [WORDS[0], " answer", " is", " 3"]
    # Rewards 0 and 1: mean 0.5, unbiased standard deviation 0.70711.
    assert first["advantage"] == pytest.approx(-0.70711, abs=1e-5)
    assert (first["versions"], first["age"]) == ([(1, 2), (2, 1), (3, 1)], 3)
    assert (first["extracted"], shown["groups"][0]["answer"]) == (f"3{SCRIPT}", "3")
    assert first["reason"] == f"equal_text{SCRIPT}"


def test_an_episode_of_several_sequences_is_one_response_with_the_starts_of_the_others(
    tmp_path: Path,
) -> None:
    run = made(tmp_path / "a")
    path = run.path / "rollouts" / "step_000001.parquet"
    batch = read_batch(path)
    branch = add_branch(batch.samples[1], (2, 1, 1))
    branch.versions = (VersionSpan(1, 3),)
    write_batch(path, batch)
    token_dump_path(run.path, 1, 0).unlink()
    plain, episode, *_ = sample_rollouts(run, None, 1e6)["samples"]
    assert "starts" not in plain
    assert (episode["starts"], episode["tokens"]) == ([4], 8)
    assert len(episode["pieces"]) == 8
    assert episode["logprobs"][4:] == [
        *(pytest.approx(float(value), abs=1e-3) for value in branch.behaviour_logprobs[:2]),
        None,
        pytest.approx(float(branch.behaviour_logprobs[2]), abs=1e-3),
    ]
    assert episode["levels"] == [(0, 6), (2, 1), (0, 1)]
    assert episode["versions"][-3:] == [(1, 2), (-1, 1), (1, 1)]


NAN = float("nan")


def test_columns_with_a_label_are_shown_and_a_teacher_is_compared_before_a_reference(
    tmp_path: Path,
) -> None:
    columns = {"reference_logprob": [-1.0, -2.5, NAN, -3.14159], "teacher_logprob": [NAN] * 4}
    shown = sample_rollouts(made(tmp_path / "a", columns=columns), None, 1e6)
    assert shown["columns"] == {"reference_logprob": "log-prob of the reference"}
    assert shown["compared"] == ["reference_logprob", "reference"]
    # The others were not scored, nor was any token by the teacher.
    scored = [sample["columns"] for sample in shown["samples"]]
    assert scored == [{"reference_logprob": [-1.0, -2.5, None, -3.14]}, {}] * 2
    columns["teacher_logprob"] = [-0.5, NAN, NAN, NAN]
    shown = sample_rollouts(made(tmp_path / "b", columns=columns), None, 1e6)
    assert shown["compared"] == ["teacher_logprob", "teacher"]
    shown = sample_rollouts(made(tmp_path / "c"), None, 1e6)
    assert (shown["columns"], shown["compared"]) == ({}, None)


@pytest.mark.parametrize(
    ("algorithm", "level"),
    [
        ({}, 3),
        ({"entropy_coefficient": 0.01}, 0),
        ({"kl": {"coefficient": 0.01}}, 0),
        ({"kl": {"coefficient": 0.0, "measure": True}}, 3),
        ({"distillation": {"coefficient": 1.0}}, 0),
    ],
)
def test_where_all_rewards_are_equal_only_other_terms_of_the_loss_train(
    algorithm: dict[str, Any], level: int, tmp_path: Path
) -> None:
    changes = {"algorithm": {"objective": "bapo", "advantage": "grpo", **algorithm}}
    run = made(tmp_path / "a", rewards=(0.5, 0.5), changes=changes)
    samples = sample_rollouts(run, None, 1e6)["samples"]
    assert [sample["levels"] for sample in samples] == [[(level, 4)]] * 4


@pytest.mark.parametrize(("columns", "num_kept"), [({}, 4), ({"teacher_logprob": [-1.0] * 4}, 2)])
def test_a_column_takes_room_of_each_token(
    columns: dict[str, list[float]],
    num_kept: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Room for four tokens of 24 bytes, or two of 34.
    monkeypatch.setattr("bapo_megatron.tools.report.rollouts._MIN_BYTES", 500 + 4 * 24)
    run = made(tmp_path / "a", rewards=(1.0, 0.0), columns=columns)
    (sample,) = sample_rollouts(run, None, 0)["samples"]
    assert len(sample["pieces"]) == num_kept


def test_token_dumps_may_be_empty_but_not_of_another_run(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    path = token_dump_path(run.path, 1, 0)
    columns = read_token_dump(path)
    write_token_dump(path, {name: values[:3] for name, values in columns.items()})
    with pytest.raises(DumpError, match=r"tokens/: 3 tokens of sample 0 of group 0, .* has 4"):
        sample_rollouts(run, None, 1e6)
    write_token_dump(path, {name: values[:0] for name, values in columns.items()})
    assert sample_rollouts(run, None, 1e6)["ratios"].startswith("0 of 4 responses")


def test_rollouts_are_sampled_to_the_room_and_a_long_response_keeps_its_two_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(tmp_path / "a")
    assert sample_rollouts(run, None, 1e6)["note"] == "All 4 responses of 1 steps."
    half = sample_rollouts(run, None, 1500)
    assert len(half["samples"]) == 2
    assert not half["has_texts"]
    assert "answer is 3" in half["samples"][0]["text"]
    least = sample_rollouts(run, find_tokenizer(run), 0)
    (sample,) = least["samples"]
    assert (sample["tokens"], "cut_at" in sample) == (4, False)  # it fits into the least room
    assert least["note"].startswith("A sample: 1 of the 4 responses of 1 steps")
    monkeypatch.setattr("bapo_megatron.tools.report.rollouts._MIN_BYTES", 500 + 2 * 24)
    (sample,) = sample_rollouts(run, find_tokenizer(run), 0)["samples"]
    assert (sample["tokens"], sample["cut_at"], len(sample["pieces"])) == (4, 1, 2)
    assert sample["versions"] == [(1, 1), (3, 1)]


def test_tokens_that_share_a_character_are_one_text() -> None:
    class ByteTokenizer:
        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            return bytes(ids).decode("utf-8", "replace")

    pieces = Pieces(ByteTokenizer())
    numbers = pieces.encode(np.array([*"aé∑".encode(), 0xFF, 65]))
    texts = [pieces.table[number][1] for number in numbers]
    assert texts == ["a", "", "é", "", "", "∑", "", "\ufffdA"]


def test_the_page_holds_no_markup_of_rollouts_no_outside_path_and_no_secret(tmp_path: Path) -> None:
    servers = [f"http://{SECRET}@one:1", f"http://two:2/{SECRET}"]
    changes = {
        "rollout": {"servers": servers, "max_response_tokens": 8},
        "data": {"train": {"path": "/outside/secret-folder/sums.jsonl"}},
        "custom": {"hf_token": SECRET},
    }
    without = {"rollout": {"servers": [], "max_response_tokens": 8}, "custom": {"hf_token": ""}}
    paths = [make_run(tmp_path / name, changes=c) for name, c in (("a", without), ("b", changes))]
    data = page_data(paths)
    page = render(data)
    for hidden in (str(tmp_path), str(Path.home()), SECRET, "secret-folder"):
        assert hidden not in page
    shown = {row[0]: row[2] for row in data["differences"]["rows"]}
    assert shown["rollout.servers"] == "http://one:1, http://two:2"
    assert shown["custom.hf_token"] == "not shown"
    assert ("custom.hf_token", "not shown") in data["cards"][1]["settings"]["rows"]
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert embedded is not None
    assert "<" not in embedded[1]
    assert WORDS[0] in {text for _, text in json.loads(embedded[1])["rollouts"][0]["pieces"]}
    assert not re.search(r'(?:src|href)="(?!#|data:)', page[: page.index("<script")])


def test_a_tokenizer_is_found_whatever_bytes_its_path_has(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run").rename(tmp_path / os.fsdecode(b"r\xff"))
    [run] = read_runs([path])
    assert find_tokenizer(run, path / "model").decode([1, 2]) == " 1  2"
    assert r"r\xff</title>" in render(page_data([path]))
    (path / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a readable tokenizer"):
        find_tokenizer(run, path / "model")
