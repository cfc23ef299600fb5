"""The arithmetic of the overlap benchmark; the runs themselves are replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo_megatron.config.load import load_config
from tests.benchmarks import bench_overlap


def make_row(rollout_s: float, training_s: float, staleness_max: float) -> dict[str, float]:
    return {
        "rollout": rollout_s,
        "training": training_s,
        "weight_sync": 1.0,
        "whole": rollout_s + training_s + 1.0,
        "generated_tokens_per_s": 100.0,
        "response_tokens_mean": 30.0,
        "resumed_samples": 2.0,
        "staleness_mean": 0.5,
        "staleness_max": staleness_max,
    }


def test_modes_take_turns_and_what_the_overlap_hides_is_a_share_of_the_shorter_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[list[str]] = []

    def train_once(data_dir: Path, settings: list[str], steps: int) -> list[dict[str, float]]:
        given.append(settings)
        is_async = "rollout.async_steps=1" in settings
        rows = [(9.0, 4.0, 3.0), (7.0, 4.0, 3.0), (8.0, 4.0, 3.0)]
        if is_async:
            rows = [(5.0, 4.0, 5.0), (6.0, 4.0, 4.0), (5.0, 4.0, 4.0)]
        return [make_row(*row) for row in rows[:steps]]

    monkeypatch.setattr(bench_overlap, "train_once", train_once)
    table = bench_overlap.measure(Path("data"), steps=3, rounds=2, common=["seed=3"])
    assert sorted(given) == sorted(
        [["seed=3", f"rollout.async_steps={steps}"] for steps in (0, 1)] * 2
    )
    assert table["async_steps 0"]["rounds"] == [13.0, 13.0]
    assert table["async_steps 1"]["median"]["whole"] == 10.0
    assert table["async_steps 1"]["median"]["staleness_max"] == 5.0
    share = bench_overlap.hidden_share(table)
    assert share == pytest.approx(0.75)  # 3 of the 4 seconds of training
    report = {
        "machine": {
            "date": "2026-11-21",
            "commit": "abc",
            "processor": "CPU",
            "python": "3.11",
            "packages": {"torch": "2", "megatron-core": "0"},
            "command": "python -m tests.benchmarks.bench_overlap",
        },
        "steps": 3,
        "rounds": 2,
        "settings": ["seed=3"],
        "modes": table,
        "hidden_share": share,
    }
    text = bench_overlap.markdown(report)
    assert "| **whole step** | 13.00 s | 10.00 s |" in text
    assert "takes 0.77 times as long" in text
    assert "hides 75% of the shorter phase" in text
    assert "one rank, seed=3:" in text


@pytest.mark.parametrize("mode", list(bench_overlap.MODES))
def test_every_setting_of_the_benchmark_exists(mode: str, tmp_path: Path) -> None:
    common = bench_overlap.overrides(tmp_path, tmp_path, steps=5)
    config = load_config(bench_overlap.CONFIG, [*common, *bench_overlap.MODES[mode]])
    assert config.train.steps == 8
    assert config.rollout.async_steps == int(mode[-1])
