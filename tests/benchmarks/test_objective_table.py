"""The arms of the table of objectives exist, and its arithmetic; the runs are replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import ADVANTAGES, OBJECTIVES
from bapo_megatron.telemetry.sinks import read_metrics
from tests.benchmarks import variants
from tests.benchmarks.objective_table import ARMS, Trained, markdown, read_run
from tests.benchmarks.variants import CONFIG
from tests.tools.sweep.files import write_base

if TYPE_CHECKING:
    from pathlib import Path


def test_every_objective_and_new_advantage_is_an_arm() -> None:
    algorithms = [load_config(CONFIG, overrides).algorithm for overrides in ARMS.values()]
    assert {algorithm.objective for algorithm in algorithms} == set(OBJECTIVES)
    assert {algorithm.advantage for algorithm in algorithms} == set(ADVANTAGES)
    assert len({str(algorithm) for algorithm in algorithms}) == len(ARMS)


def test_runs_are_summarised_and_listed(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(
        '{"step": 1, "reward/mean": 0.25, "time/training_s": 2.0, "clip/fraction_positive": 0.5, '
        '"clip/fraction_negative": 0.0}\n'
        '{"step": 2, "reward/mean": 0.75, "time/training_s": 1.0, "time/eval_s": 2.0, '
        '"eval/heldout/avg_at_k": 0.625}\n'
    )
    assert len(read_metrics(metrics)) == 2
    trained = read_run(metrics, seed=4)
    assert trained == Trained(4, 0.625, 0.5, pytest.approx(0.25), 5.0)
    machine = {
        "date": "2026-11-23",
        "commit": "abc",
        "processor": "CPU",
        "python": "3.11",
        "packages": {"torch": "2", "megatron-core": "0"},
        "command": "python -m tests.benchmarks.objective_table",
    }
    text = markdown({"machine": machine, "steps": 2}, {"cispo": [trained]})
    assert "| cispo | 62.5% | **62.5%** | 0.500 | 25.0% | 5 s |" in text
    assert "- cispo: `algorithm.objective=cispo`" in text


def test_arms_are_the_variants_of_one_sweep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_base(tmp_path)  # a model, and prompts as of make-tiny
    monkeypatch.setattr(variants, "run_sweep", lambda sweep: [])
    arms = {name: ARMS[name] for name in ("bapo", "clip, dual_clip 3")}
    runs = variants.train_variants(
        tmp_path, tmp_path / "runs", arms, common=["rollout.engine=local"], seeds=2, steps=3
    )
    assert list(runs) == list(arms)
    first, second = runs["clip, dual_clip 3"]
    assert second.run_dir == tmp_path / "runs" / "clip-dual_clip-3" / "seed1"
    assert (second.seed, second.ranks, second.config.train.steps) == (1, 1, 3)
    assert (first.config.algorithm.dual_clip, first.config.rollout.engine) == (3, "local")
