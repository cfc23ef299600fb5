"""The arithmetic of benchmarks whose runs take long; the runs themselves are replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bapo_megatron.algorithm.objectives.bapo import Bapo, BapoConfig
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import ADVANTAGES, OBJECTIVES
from tests.benchmarks import bench_async_learning, bench_overlap, bench_rewards, demo_runs
from tests.benchmarks import bench_speculation as speculation
from tests.benchmarks import bench_tolerances as tolerances
from tests.benchmarks import objective_table as objectives
from tests.benchmarks import reward_pairs as pairs
from tests.benchmarks.bench_async_learning import CURVES, MODES
from tests.benchmarks.helpers import MACHINE, run_main
from tests.tools.sweep.files import write_base

NO_NEWS = "own weights, r = 1"


@pytest.mark.parametrize(
    ("overrides", "async_steps"),
    [
        *((MODES[name], name != "synchronous") for name in MODES),
        *(([*bench_overlap.SETTINGS, *o], int(m[-1])) for m, o in bench_overlap.MODES.items()),
    ],
)
def test_every_setting_of_the_modes_exists(overrides: list[str], async_steps: int) -> None:
    common = demo_runs.overrides(Path("data"), 8)
    config = load_config(demo_runs.CONFIG, [*common, *overrides])
    assert (config.train.steps, config.rollout.async_steps) == (8, async_steps)


@pytest.mark.slow
def test_modes_are_compared_seed_by_seed_and_drawn(tmp_path: Path) -> None:
    trainings = {
        mode: [
            {
                "seed": seed,
                "accuracy": accuracy,
                "generated_tokens": 1000.0,
                "resumed_samples": 12.0,
            }
            | {"curves": {name: [age] * 4 for name in CURVES}}
            for seed, accuracy in enumerate(accuracies)
        ]
        for mode, accuracies, age in (
            ("synchronous", (0.80, 0.90, 0.85), 0.0),
            ("one step ahead", (0.79, 0.88, 0.82), 1.0),
        )
    }
    # -1, -2, -3 points: t(0.975, 2) · 1 / √3 = 4.303 / 1.732 = 2.48.
    paired = bench_async_learning.difference(trainings)
    assert paired.difference == pytest.approx(-0.02)
    assert (paired.low, paired.high) == pytest.approx((-0.0448, 0.0048), abs=1e-4)
    picture = tmp_path / "picture.png"
    demo_runs.draw(
        CURVES, {name: [run["curves"] for run in runs] for name, runs in trainings.items()}, picture
    )
    assert picture.stat().st_size > 10_000
    text = bench_async_learning.markdown({"machine": MACHINE, "steps": 4}, trainings, picture.name)
    assert (
        "| synchronous | 80.0% | 90.0% | 85.0% | **85.0%** | 1,000 | 12 | 0% | 0.0 updates |"
        in text
    )
    assert "ahead less synchronous: -2.0 points, 95 % interval -4.5 … +0.5 (Student's t" in text


def test_modes_take_turns_and_what_the_overlap_hides_is_a_share_of_the_shorter_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[list[str]] = []

    def row(rollout_s: float, staleness_max: float) -> dict[str, float]:
        times = {"rollout": rollout_s, "training": 4.0, "weight_sync": 1.0}
        others = {
            "generated_tokens_per_s": 100.0,
            "response_tokens_mean": 30.0,
            "resumed_samples": 2.0,
            "staleness_mean": 0.5,
            "staleness_max": staleness_max,
        }
        return {**times, "whole": rollout_s + 5.0, **others}

    def train_once(data_dir: Path, settings: list[str], steps: int) -> list[dict[str, float]]:
        calls.append(settings)
        if "rollout.async_steps=1" in settings:
            return [row(5.0, 5.0), row(6.0, 4.0), row(5.0, 4.0)]
        return [row(9.0, 3.0), row(7.0, 3.0), row(8.0, 3.0)]

    monkeypatch.setattr(bench_overlap, "train_once", train_once)
    modes = bench_overlap.measure(Path("data"), steps=3, rounds=2, common=["seed=3"])
    assert sorted(calls) == sorted(
        [["seed=3", f"rollout.async_steps={steps}"] for steps in (0, 1)] * 2
    )
    assert modes["async_steps 0"]["rounds"] == [13.0, 13.0]
    assert modes["async_steps 1"]["median"]["whole"] == 10.0
    assert modes["async_steps 1"]["median"]["staleness_max"] == 5.0
    share = bench_overlap.hidden_share(modes)
    assert share == pytest.approx(0.75)  # 3 of the 4 seconds of training
    report = {"machine": MACHINE, "steps": 3, "rounds": 2, "settings": ["seed=3"]}
    text = bench_overlap.markdown({**report, "modes": modes, "hidden_share": share})
    assert "| **whole step** | 13.00 s | 10.00 s |" in text
    assert "takes 0.77 times as long" in text
    assert "hides 75% of the shorter phase" in text
    assert "one rank, seed=3:" in text


def test_every_objective_and_new_advantage_is_an_arm() -> None:
    arms = [load_config(demo_runs.CONFIG, arm).algorithm for arm in objectives.ARMS.values()]
    assert {algorithm.objective for algorithm in arms} == set(OBJECTIVES)
    # What needs a teacher is in examples/distill.yaml.
    assert {algorithm.advantage for algorithm in arms} == set(ADVANTAGES) - {"distill"}
    assert len({str(algorithm) for algorithm in arms}) == len(objectives.ARMS)


def test_runs_of_arms_are_summarised_and_listed(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(
        '{"step": 1, "reward/mean": 0.25, "time/training_s": 2.0, "clip/fraction_positive": 0.5, '
        '"clip/fraction_negative": 0.0}\n'
        '{"step": 2, "reward/mean": 0.75, "time/training_s": 1.0, "time/eval_s": 2.0, '
        '"eval/heldout/avg_at_k": 0.625}\n'
    )
    trained = objectives.read_run(metrics, seed=4)
    assert list(trained.values()) == [4, 0.625, 0.5, pytest.approx(0.25), 5.0]
    text = objectives.markdown({"machine": MACHINE, "steps": 2}, {"cispo": [trained]})
    assert "| cispo | 62.5% | **62.5%** | 0.500 | 25.0% | 5 s |" in text
    assert "- cispo: `algorithm.objective=cispo`" in text


def test_arms_are_the_variants_of_one_sweep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_base(tmp_path)  # a model, and prompts as of make-tiny
    monkeypatch.setattr(demo_runs, "run_sweep", lambda sweep: [])
    arms = {name: objectives.ARMS[name] for name in ("bapo", "clip, dual_clip 3")}
    runs = demo_runs.train_variants(
        tmp_path, tmp_path / "runs", arms, common=["rollout.engine=local"], seeds=2, steps=3
    )
    assert list(runs) == list(arms)
    first, second = runs["clip, dual_clip 3"]
    assert second.run_dir == tmp_path / "runs" / "clip-dual_clip-3" / "seed1"
    assert (second.seed, second.ranks, second.config.train.steps) == (1, 1, 3)
    assert (first.config.algorithm.dual_clip, first.config.rollout.engine) == (3, "local")


def _updates(bapo: Bapo, noise: float) -> speculation.History:
    """Statistics of 40 updates of 400 tokens whose log-probs moved by ``noise``."""
    generator = torch.Generator().manual_seed(0)
    updates = []
    for _ in range(40):
        behaviour_T = -torch.rand(400, generator=generator)
        moved_T = behaviour_T + noise * torch.randn(400, generator=generator)
        advantage_T = torch.randn(400, generator=generator)
        known_K, total_K = (
            bapo.search.contributions(policy_T, behaviour_T, advantage_T, torch.ones(400))
            for policy_T in (behaviour_T, moved_T)
        )
        updates.append((known_K, total_K))
    return updates


def test_predictions_are_right_where_nothing_moved_and_cost_passes_where_they_are_not() -> None:
    bapo = Bapo(BapoConfig(), None)
    still = speculation.score(_updates(bapo, 0.0), bapo, steps=20)
    assert still["hit_share"][NO_NEWS] == still["hit_share"][speculation.SHIPPED] == 1.0
    # The first updates, in which `auto` relies on nothing, are not among the last 20.
    assert still["regret"][NO_NEWS] == 0.0
    assert sum(still["exits"].values()) == still["updates"] == 20
    moved = speculation.score(_updates(bapo, 2.0), bapo, steps=20)
    assert moved["hit_share"][NO_NEWS] == 0.0
    assert moved["hit_share"][speculation.SHIPPED] == 1.0


def test_regret_is_at_most_that_of_the_plain_order_once_misses_are_known() -> None:
    assert speculation.regret([True] * 200, first=100) == pytest.approx(1 / speculation.LOSS_SHARE)
    assert speculation.regret([False] * 200, first=100) == 0.0


def test_a_report_of_predictions_has_every_lag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"never": 0.2, "always": 0.15, "auto": 0.16}
    monkeypatch.setattr(speculation, "record", lambda *_: tmp_path)
    monkeypatch.setattr(speculation, "read_updates", lambda _, bapo: _updates(bapo, 0.3))
    monkeypatch.setattr(speculation, "time_modes", lambda *_: seconds)
    out = tmp_path / "report"
    report, text = run_main("bench_speculation", out, str(tmp_path), "--updates=20")
    for cells in report["cells"].values():
        assert list(cells) == [str(lag) for lag in speculation.LAGS]
        for cell in cells.values():
            assert 400 < cell["simulated_s"] < report["plain_32b_s"] + 300
    assert "| `always`: ms per update | 150.0 (0.75) |" in text
    assert out.with_suffix(".png").stat().st_size > 10_000


def test_the_load_has_its_share_of_hostile_answers_in_a_fixed_order() -> None:
    load = bench_rewards.Load(1000, 0.01, 0.1, 2, 5.0, 2048, 800)
    items = bench_rewards.make_items(load)
    assert len(items) == 1000
    assert sum(bool(item.hostile) for item in items) == 10
    assert len({(item.response, item.answer) for item in items if item.reward is None}) >= 100
    assert items == bench_rewards.make_items(load)


@pytest.mark.slow
def test_answers_are_graded_and_counted_while_a_heartbeat_goes_on() -> None:
    load = bench_rewards.Load(40, 0.1, 0.5, 1, 5.0, 2048, 800)
    row = bench_rewards.measure("1 in 10", load)
    assert (row["hostile"], row["wrong"]) == (4, 0)
    assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"]
    assert row["heartbeat_max_ms"] >= row["heartbeat_p99_ms"] > 0
    assert "| 1 in 10 |" in bench_rewards._report(load, [row], (1.0, 2.0), MACHINE)


def test_pairs_are_graded_and_accepted_ones_are_listed() -> None:
    asked = [("line", "1+2x", "2x+1"), ("line", "|x|", "2x+1"), ("list", "1,2", "1,3")]
    graded = pairs.grade(asked)
    assert [one.reward for one in graded] == [1.0, 0.0, 0.0]
    assert "2 gradings: 0 were taken" in pairs._report_universal(graded[1:], MACHINE)
    report = pairs._report_pairs(graded, pairs.Rewritten(3, 2, (("x", "y"),)), MACHINE)
    assert "3 pairs" in report
    assert "| line | `1+2x` | `2x+1` | `equal_value` |" in report
    assert "- `x` for `y`" in report


def test_a_reference_is_rewritten_in_several_ways() -> None:
    spellings = pairs._spellings("(x+1)(x-1)")
    assert "x^{2} - 1" in spellings
    assert len(spellings) == len(set(spellings)) >= 2
    assert pairs._spellings("x=1") == []


def test_pairs_of_data_sets_are_different_and_the_same_each_time(shared_data: Any) -> None:
    drawn = pairs.data_pairs(shared_data, 50)
    assert drawn == pairs.data_pairs(shared_data, 50)
    assert {form for form, _, _ in drawn} == {"gsm8k_test", "aime24", "aime25"}
    assert all(answer != reference for _, answer, reference in drawn)


def test_a_test_shows_its_smallest_margin_in_every_environment(tmp_path: Path) -> None:
    for number, name in enumerate(tolerances.ENVIRONMENTS):
        records = [
            {"test": f"tests/a.py::test_it[{case}]", "what": "", "error": error, "bound": 8e-6}
            for case, error in enumerate((0.0, 1e-6 * (1 + number), 5e-7))
        ]
        path = tmp_path / f"{name.replace(' ', '_')}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    report, text = run_main("bench_tolerances", tmp_path / "page", f"--records={tmp_path}")
    assert "| a.py: test it | 1.0e-06 | 8.0e-06 | 8.0 | 4.0 | 2.7 | 2.0 | 1.6 |" in text
    assert report["environments"]["2 threads"]["tests/a.py::test_it"]["bound"] == 8e-6


def test_the_numeric_tests_are_found_also_where_a_helper_compares() -> None:
    found = tolerances.numeric_tests()
    assert {"tests/policy/test_lora.py", "tests/policy/test_delta_net.py"} < {*found}
    assert {"tests/trainer/test_correction.py", "tests/ops/test_logprob.py"} < {*found}
