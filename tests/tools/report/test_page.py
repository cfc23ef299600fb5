"""What the page is made of, without a browser."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.data.token_dump import read_token_dump, token_dump_path, write_token_dump
from bapo_megatron.evaluation.report import write_results
from bapo_megatron.telemetry.starts import Start
from bapo_megatron.tools.report.checks import CHECKS, findings_of, results_of
from bapo_megatron.tools.report.figures import PANELS, panels_of, phases_of
from bapo_megatron.tools.report.overview import (
    card_of,
    difference_table,
    evaluation_table,
    seed_table,
)
from bapo_megatron.tools.report.page import page_data, render
from bapo_megatron.tools.report.rollouts import sample_rollouts
from bapo_megatron.tools.report.runs import (
    Run,
    events_of,
    group_runs,
    read_runs,
)
from bapo_megatron.tools.report.tokens import Pieces, find_tokenizer
from tests.evaluation.results import result
from tests.launch import REPOSITORY
from tests.tools.report.made_runs import RATIOS, SCRIPT, SECRET, WORDS, make_run


def run_of(*rows: dict[str, float], **settings: object) -> Run:
    return Run(Path("runs/a"), "a", tuple(rows), settings)


def test_seeds_of_a_configuration_are_one_band_with_mean_and_range(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / f"seed{seed}", seed=seed) for seed in (0, 1, 2)]
    other = make_run(tmp_path / "fast", changes={"optimizer": {"lr": 1e-3}})
    groups, differing = group_runs(read_runs([*paths, other]))
    # The runs' own directories hold model and data, so they differ, too.
    assert "optimizer.lr" in differing
    assert not {"seed", "run_dir"} & set(differing)
    same = [
        run_of({"step": 1, "reward/mean": value}, **{"seed": n, "train.steps": 1})
        for n, value in enumerate((1, 2, 6))
    ]
    groups, differing = group_runs(same)
    assert (len(groups), differing) == (1, [])
    curve = panels_of(groups)[0]["curves"][0]
    assert (curve["y"], curve["low"], curve["high"]) == ([3.0], [1.0], [6.0])
    # One seed is further than the others: its own values are no mean.
    same[2] = replace(same[2], rows=(*same[2].rows, {"step": 2, "reward/mean": 9.0}))
    assert panels_of(group_runs(same)[0])[0]["curves"][0]["x"] == [1]


def test_a_setting_that_another_version_does_not_know_makes_no_group() -> None:
    old = {"algorithm.objective": "bapo", "reward.overlong": None, "seed": 0}
    new = {**old, "seed": 1, "checkpoint.verify": True}
    clip = {**new, "algorithm.objective": "clip"}
    shaped = {"algorithm.objective": "bapo", "reward.overlong.penalty": 1.0}
    two_sets = {**old, "data.train.0.path": "a", "data.train.1.path": "b"}
    one_set = {**old, "data.train.0.path": "a"}
    names = ["bapo-0", "bapo-1", "clip-0", "shaped", "two", "one"]
    settings = [old, new, clip, shaped, two_sets, one_set]
    runs = [
        Run(Path(name), name, ({"step": 1},), given)
        for name, given in zip(names, settings, strict=True)
    ]
    groups, differing = group_runs(runs[:4])
    assert [group.label for group in groups] == ["bapo (2 seeds)", "clip-0", "shaped"]
    assert set(differing) == {"algorithm.objective", "reward.overlong.penalty"}
    assert len(group_runs(runs[4:])[0]) == 2
    first, second = (
        replace(runs[1], name=f"k={k}", settings={**new, "optimizer.k": k}) for k in (1, 2)
    )
    table = difference_table(*group_runs([runs[0], first, second]))
    assert table["rows"] == [["optimizer.k", "1", "2"]]


def test_a_seed_that_a_group_has_already_begins_another_one() -> None:
    runs = [
        Run(Path(name), name, ({"step": 1, "eval/a/avg_at_k": 0.5},), {"train.steps": 1, "seed": n})
        for name, n in (("a-0", 0), ("again", 0), ("a-1", 1))
    ]
    groups, differing = group_runs(runs)
    assert [(group.label, len(group.runs)) for group in groups] == [
        ("a (2 seeds)", 2),
        ("again", 1),
    ]
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
    runs = [Run(Path(n), n, ({"step": 1},), {"train.steps": 1, "seed": n}) for n in names]
    (group,) = group_runs(runs)[0]
    assert group.label == label


def test_scores_have_intervals_over_seeds_and_differences_are_paired_by_seed() -> None:
    scores = {"bapo": (0.5, 0.6, 0.7), "clip": (0.6, 0.8, 0.7), "none": (0.9,)}
    runs = [
        Run(
            Path(f"{name}-{seed}"),
            f"{name}-{seed}",
            ({"step": 4, "eval/heldout/avg_at_k": score},),
            {"algorithm.objective": name, "seed": seed},
        )
        for name, values in scores.items()
        for seed, score in enumerate(values)
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
    ]
    assert seed_table(group_runs(runs[-1:])[0])["rows"] == []


def test_evaluations_on_other_problems_of_the_same_name_are_not_compared(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a")
    for name, problem in (("start", "a:0"), ("step_000006", "b:0")):
        write_results([result({problem: ["2"]}, name="heldout")], path / "eval" / f"{name}.json")
    table = evaluation_table(read_runs([path]))
    assert table["headings"][3:7] == [
        "k",
        "problems",
        "avg@k (95% interval)",
        "change since the first, pp",
    ]
    assert [row[3:7:3] for row in table["rows"]] == [[1, ""], [1, "other problems"]]


def test_runs_are_named_by_as_much_of_their_paths_as_tells_them_apart(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "x/a"), make_run(tmp_path / "y/a")])
    assert [run.name for run in runs] == ["x/a", "y/a"]
    with pytest.raises(ValueError, match="given twice"):
        read_runs([tmp_path / "x/a", tmp_path / "x/../x/a"])


def test_a_missing_or_empty_run_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metrics\.jsonl: no such file; give the directory"):
        read_runs([tmp_path])


def test_weight_syncs_evaluations_faults_and_restarts_are_events() -> None:
    run = run_of(
        {"step": 1, "weight_sync/syncs": 1.0},
        {"step": 2, "reward/errors": 3.0},
        {"step": 3, "eval/heldout/avg_at_k": 0.5},
    )
    starts = (
        Start("2026-11-24T00:00:00+00:00", step, commit, {}, "node", 1)
        for step, commit in ((0, "1f"), (2, "1f"), (2, "2e"))
    )
    found = events_of(replace(run, starts=tuple(starts)))
    assert [(event.kind, event.step) for event in found] == [
        *(("sync", 1), ("fault", 2), ("evaluation", 3), ("restart", 3), ("restart", 3))
    ]
    assert [event.text for event in found[3:]] == [
        "resumed after 2 finished steps",
        "resumed after 2 finished steps, at commit 2e instead of 1f",
    ]


@pytest.mark.parametrize(
    ("metric", "values", "level", "text"),
    [
        ("train/updates", [1, 0, 1], "fault", "step 2) made no update (the run: 2 of 2)"),
        ("reward/mean", [0, 0, 0], "fault", "The mean reward was 0 in every step"),
        ("mismatch/logprob_abs_mean", [1e-6, 0.4, 0.3], "fault", "in 2 of 3 steps (steps 2, 3)"),
        ("mismatch/logprob_abs_mean", [1e-6, 0.01], "fault", "its weights are likely stale"),
        ("mismatch/logprob_abs_mean", [0.2, 0.3], "fault", "it likely computes differently"),
        ("reward/mean", [0.5] * 10 + [0.1] * 5, "fault", "0.500 (mean of steps 1 to 3) to 0.1"),
        ("policy/grad_norm_max", [1] * 5 + [50, 12, 11], "caution", "50 times its median"),
        ("policy/entropy", [1, 0.5, 0.05, 0.05, 0.05], "caution", "token (step 1) to 0.05 (mean"),
        ("policy/kl_behaviour", [0.01, 0.3], "caution", "high, or tokens are old, or"),
        ("rollout/age_p90", [2] * 6 + [40] * 6, "caution", "(mean of steps 7 to 12)"),
        ("rollout/truncated_share", [0.5], "caution", "are truncated (step 1)"),
    ],
)
def test_checks_find_runs_that_go_wrong(
    metric: str, values: list[float], level: str, text: str
) -> None:
    found = findings_of(run_of(*({"step": n, metric: v} for n, v in enumerate(values, start=1))))
    assert [finding.level for finding in found] == [level]
    assert text in found[0].text


def test_every_check_says_in_how_many_steps_it_was_measured_and_what_it_lacks() -> None:
    rows = [{"step": n, "reward/mean": 0.1 * n, "data/sums/reward_mean": 0.5} for n in range(4)]
    rows[1]["mismatch/logprob_abs_mean"] = 3e-7
    found = {name: row for name, *row in results_of(run_of(*rows))}
    assert found["constant reward"] == ["passed", "3 of 3", ""]
    assert found["falling reward"] == ["not measured", "3 of 3", "Needs 10 steps."]
    assert found["data set without reward"] == ["not measured", "0 of 3", "Needs two data sets."]
    result, count, lacking = found["engine against trainer"]
    assert (result, count) == ("passed in few steps", "1 of 3")
    assert "rollout.weight_sync.verify: every would compare after each weight sync" in lacking
    rows[2]["mismatch/logprob_abs_mean"] = 0.3
    found = {name: row for name, *row in results_of(run_of(*rows))}
    assert found["engine against trainer"][0] == "found"


def test_a_finding_names_a_panel_that_exists_and_how_to_group_its_rollouts() -> None:
    assert {check.panel for check in CHECKS} <= {panel.title for panel in PANELS}
    row = {"step": 1, "data/sums/reward_mean": 0.5, "data/words/reward_mean": 0.0}
    (found,) = findings_of(run_of(row))
    assert (found.panel, found.rollouts) == ("Reward by data set", "source")


def test_checks_are_silent_about_a_run_that_learns() -> None:
    rows = [
        {
            "step": n,
            "reward/mean": 0.2 + 0.01 * n,
            "policy/entropy": 1 - 0.01 * n,
            "train/updates": 4,
        }
        for n in range(1, 40)
    ]
    assert findings_of(run_of(*rows)) == []


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        ("mismatch/logprob_abs_mean", [0.01, 0.02, 0.03]),  # bfloat16
        ("policy/grad_norm_max", [1] * 8 + [50]),
        ("train/skipped_updates", [0, 2]),  # all rewards of their groups were equal
    ],
)
def test_checks_are_silent_about_what_healthy_runs_do(metric: str, values: list[float]) -> None:
    assert (
        findings_of(run_of(*({"step": n, metric: v} for n, v in enumerate(values, start=1)))) == []
    )


def test_checks_are_silent_about_a_healthy_run() -> None:
    (run,) = read_runs([REPOSITORY / "examples/demo_grpo"])
    assert len(run.steps) == 24
    assert findings_of(run) == []


def test_a_data_set_with_wrong_answers_is_found_while_another_one_learns() -> None:
    rows = [
        {"step": n, "data/right/reward_mean": 0.3 + 0.02 * n, "data/shifted/reward_mean": 0.04}
        for n in range(1, 13)
    ]
    run = run_of(*rows)
    (found,) = findings_of(run)
    assert found.level == "fault"
    assert found.text.startswith(
        "The reward of 'shifted' stays low, 0.04 (mean of steps 1 to 4) and 0.04 (mean of steps 9 "
        "to 12), while that of 'right' goes from 0.35 to 0.51: its answers or its reward function "
        "are likely wrong"
    )
    (panel,) = panels_of(group_runs([run])[0])
    assert panel["title"] == "Reward by data set"
    assert [curve["name"] for curve in panel["curves"]] == ["right", "shifted"]


def test_a_hard_data_set_that_improves_is_no_finding() -> None:
    rows = [
        {"step": n, "data/easy/reward_mean": 0.9, "data/hard/reward_mean": 0.01 * n}
        for n in range(1, 13)
    ]
    assert findings_of(run_of(*rows)) == []


def test_a_stale_engine_is_found_before_it_is_far_from_the_trainer() -> None:
    rows = [{"step": n, "mismatch/logprob_abs_mean": 4e-7 + 0.002 * n} for n in range(12)]
    (found,) = findings_of(run_of(*rows))
    assert "since the first value was 4e-07" in found.text
    assert found.steps == tuple(range(3, 12))
    assert "identical" not in found.text
    same = {"eval/heldout/avg_at_k": 0.25, "eval/heldout/response_tokens_mean": 35.5}
    rows[0] |= same
    rows[11] |= same
    (found,) = findings_of(run_of(*rows))
    assert "All 2 evaluations on 'heldout' are identical. Versions and ages are what" in found.text
    rows[11]["eval/heldout/response_tokens_mean"] = 35.0
    assert "identical" not in findings_of(run_of(*rows))[0].text


def test_a_learning_rate_too_high_is_named_where_tokens_are_young() -> None:
    rows: list[dict[str, float]] = [
        {"step": n, "policy/kl_behaviour": 0.2, "rollout/age_max": age, "reward/mean": reward}
        for n, (age, reward) in enumerate([(0, 0.3)] * 5 + [(3, 0.02)] * 10, start=1)
    ]
    fallen, far = findings_of(run_of(*rows))
    assert fallen.text == (
        "The reward fell from 0.300 (mean of steps 1 to 3) to 0.020 (mean of steps 13 to 15): "
        "training diverged. A learning rate too high is the usual cause; no token was older than "
        "3 updates."
    )
    assert far.text.endswith(
        "Likely the learning rate is too high, or the engine has other weights: the batch of step "
        "1 held no token older than 0 updates."
    )
    rows[6]["mismatch/logprob_abs_mean"] = 3e-7
    assert findings_of(run_of(*rows))[1].text.endswith(
        "Likely the learning rate is too high: the batch of step 1 held no token older than 0 "
        "updates, and engine and trainer agreed to 3e-07 nats in step 7."
    )


def test_the_card_says_how_many_updates_were_possible_and_of_which_step_a_figure_is() -> None:
    rows = [
        {"step": n, "train/updates": 4 - n, "train/skipped_updates": n, "reward/mean": 0.1 * n}
        for n in (1, 2)
    ]
    (group,) = group_runs([run_of(*rows)])[0]
    card = card_of(group)
    shown = dict(zip(card["headings"], card["rows"][0], strict=True))
    assert shown["updates made"] == "5 of 8"
    assert shown["reward, last step"] == "0.200"


def test_the_card_says_why_updates_were_skipped_and_holds_the_configuration() -> None:
    row = {"step": 1, "train/skipped_updates": 3, "reward/mixed_groups": 0.25}
    start = Start("2026-11-24T00:00:00+00:00", 0, "1f", {"torch": "2.13"}, "node", 1)
    run = replace(run_of(row, **{"train.steps": 1}), starts=(start,))
    card = card_of(group_runs([run])[0][0])
    assert card["notes"] == [
        "3 of 3 updates were skipped: all groups of such an update had equal rewards; 75.0% of "
        "the groups had equal rewards."
    ]
    assert card["settings"]["rows"] == [("commit", "1f"), ("torch", "2.13"), ("train.steps", "1")]
    masked = run_of({**row, "rollout/masked_token_share": 0.1})
    assert "or none of its tokens could train" in card_of(group_runs([masked])[0][0])["notes"][0]


def test_phases_that_took_no_time_are_left_out(tmp_path: Path) -> None:
    (run,) = read_runs([make_run(tmp_path / "a")])
    assert [phase["name"] for phase in phases_of(run)["phases"]] == ["training", "rollout"]


def test_one_data_set_without_any_reward_is_found() -> None:
    row = {"step": 1, "data/sums/reward_mean": 0.5, "data/words/reward_mean": 0.0}
    (found,) = findings_of(run_of(row))
    assert "'words' got 0" in found.text


def test_ratios_come_from_the_token_dump_by_group_and_index(tmp_path: Path) -> None:
    (run,) = read_runs([make_run(tmp_path / "a")])
    found = sample_rollouts(run, find_tokenizer(run), 1e6)
    first, *others = found["samples"]
    assert first["ratios"] == RATIOS
    assert [sample["right"] for sample in found["samples"]] == [False, True] * 2
    assert [other["ratios"] for other in others] == [[1.0] * 4, None, None]
    assert found["ratios"].startswith("Ratios of 2 of 4 responses")
    assert [found["pieces"][piece][1] for piece in first["pieces"]] == [
        WORDS[0],
        " answer",
        " is",
        " 3",
    ]
    # Rewards 0 and 1: mean 0.5, unbiased standard deviation 0.70711.
    assert first["advantage"] == pytest.approx(-0.70711, abs=1e-5)
    assert (first["versions"], first["age"]) == ([(1, 2), (2, 1), (3, 1)], 3)
    assert (first["extracted"], found["groups"][0]["answer"]) == (f"3{SCRIPT}", "3")
    assert first["reason"] == f"equal_text{SCRIPT}"


def test_a_token_dump_without_rows_has_no_ratios(tmp_path: Path) -> None:
    (run,) = read_runs([make_run(tmp_path / "a")])
    path = token_dump_path(run.path, 1, 0)
    columns = read_token_dump(path)
    write_token_dump(path, {name: values[:0] for name, values in columns.items()})
    found = sample_rollouts(run, None, 1e6)
    assert found["ratios"].startswith("Ratios of 0 of 4 responses")


def test_a_long_response_keeps_its_two_ends(tmp_path: Path) -> None:
    (run,) = read_runs([make_run(tmp_path / "a")])
    found = sample_rollouts(run, find_tokenizer(run), 0)
    (sample,) = found["samples"]
    assert sample["tokens"] == 4
    assert "cut_at" not in sample  # it fits into the least room
    assert found["note"].startswith("A sample: 1 responses of 1 of 1 steps")


def test_tokens_that_share_a_character_are_one_text() -> None:
    class ByteTokenizer:
        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            return bytes(ids).decode("utf-8", "replace")

    pieces = Pieces(ByteTokenizer())
    numbers = pieces.encode(np.array([*"aé∑".encode(), 0xFF, 65]))
    texts = [pieces.table[number][1] for number in numbers]
    assert texts == ["a", "", "é", "", "", "∑", "", "\ufffdA"]


def test_the_page_holds_no_markup_of_rollouts_no_outside_path_and_no_secret(tmp_path: Path) -> None:
    server = {"extra_args": ["--api-key", SECRET, f"--admin-api-key={SECRET}"]}
    grader = {"name": "own", "function": None, "url": f"http://me:{SECRET}@host/x?token={SECRET}"}
    changes: dict[str, Any] = {
        "rollout": {
            "server": server,
            "servers": [f"http://{SECRET}@one:1", f"http://two:2/{SECRET}"],
            "max_response_tokens": 8,
        },
        "reward": {"functions": [{**grader, "http": {"token_variable": "GRADER_TOKEN"}}]},
        "data": {"train": {"path": "/outside/secret-folder/sums.jsonl"}},
        "custom": {"api_key": SECRET, "wandb_api_key": SECRET, "hf_token": SECRET},
    }
    without = {
        "rollout": {"server": {"extra_args": []}, "servers": [], "max_response_tokens": 8},
        "custom": dict.fromkeys(changes["custom"], ""),
    }
    paths = [make_run(tmp_path / name, changes=c) for name, c in (("a", without), ("b", changes))]
    data = page_data(paths)
    page = render(data)
    for hidden in (str(tmp_path), str(Path.home()), SECRET, "secret-folder"):
        assert hidden not in page
    shown = {row[0]: row[2] for row in data["differences"]["rows"]}
    assert shown["reward.functions.0.url"] == "http://host"
    assert shown["rollout.servers"] == "http://one:1, http://two:2"
    assert shown["custom.hf_token"] == "not shown"
    assert ("custom.hf_token", "not shown") in data["cards"][1]["settings"]["rows"]
    held = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert held is not None
    assert "<" not in held[1]
    assert WORDS[0] in {text for _, text in json.loads(held[1])["rollouts"][0]["pieces"]}
    assert not re.search(r'(?:src|href)="(?!#|data:)', page[: page.index("<script")])


def test_rollouts_of_many_bytes_are_sampled_to_the_room(tmp_path: Path) -> None:
    (run,) = read_runs([make_run(tmp_path / "a")])
    whole = sample_rollouts(run, None, 1e6)
    assert whole["note"] == "All 4 responses of 1 steps."
    half = sample_rollouts(run, None, 1500)
    assert len(half["samples"]) == 2
    assert not half["has_texts"]
    assert "answer is 3" in half["samples"][0]["text"]


def test_a_tokenizer_is_found_whatever_bytes_its_path_has(tmp_path: Path) -> None:
    made = make_run(tmp_path / "made").rename(tmp_path / os.fsdecode(b"r\xff"))
    [run] = read_runs([made])
    assert find_tokenizer(run, made / "model").decode([1, 2]) == " 1  2"
    assert r"r\xff</title>" in render(page_data([made]))
