"""The arithmetic of benchmarks whose runs take long; the runs themselves are replaced."""

import json
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import ADVANTAGES, OBJECTIVES
from tests.benchmarks import bench_rewards, demo_runs
from tests.benchmarks import bench_tolerances as tolerances
from tests.benchmarks import objective_table as objectives
from tests.benchmarks import reward_pairs as pairs
from tests.benchmarks.helpers import MACHINE, run_main
from tests.tools.sweep.files import write_base


def test_every_objective_and_new_advantage_is_an_arm() -> None:
    arms = [load_config(demo_runs.CONFIG, arm).algorithm for arm in objectives.ARMS.values()]
    assert {algorithm.objective for algorithm in arms} == set(OBJECTIVES)
    # What needs a teacher is in examples/distill.yaml; nll has no advantages.
    assert {algorithm.advantage for algorithm in arms} == set(ADVANTAGES) - {"distill", "none"}
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
    write_base(tmp_path)  # a model, and prompts as of examples.tiny
    monkeypatch.setattr(demo_runs, "run_sweep", lambda sweep: {})
    arms = {name: objectives.ARMS[name] for name in ("bapo", "clip, dual_clip 3")}
    runs = demo_runs.train_variants(
        tmp_path, tmp_path / "runs", arms, common=["rollout.engine=local"], seeds=2, steps=3
    )
    assert list(runs) == list(arms)
    first, second = runs["clip, dual_clip 3"]
    assert second.run_dir == tmp_path / "runs" / "clip-dual_clip-3" / "seed1"
    assert (second.seed, second.ranks, second.config.train.steps) == (1, 1, 3)
    assert (first.config.algorithm.dual_clip, first.config.rollout.engine) == (3, "local")


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
