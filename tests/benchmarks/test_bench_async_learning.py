"""The arithmetic of the benchmark of asynchronous learning; the runs themselves are replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo_megatron.config.load import load_config
from tests.benchmarks import bench_async_learning
from tests.benchmarks.bench_async_learning import CURVES, MODES, Training
from tests.benchmarks.variants import CONFIG

MACHINE = {
    "date": "2026-11-21",
    "commit": "abc",
    "processor": "CPU",
    "python": "3.11",
    "packages": {"torch": "2", "megatron-core": "0"},
    "command": "python -m tests.benchmarks.bench_async_learning",
}


@pytest.mark.slow
def test_modes_are_compared_seed_by_seed_and_drawn(tmp_path: Path) -> None:
    found = {
        mode: [
            Training(seed, accuracy, 1000.0, 12.0, {name: [age] * 4 for name in CURVES})
            for seed, accuracy in enumerate(accuracies)
        ]
        for mode, accuracies, age in (
            ("synchronous", (0.80, 0.90, 0.85), 0.0),
            ("one step ahead", (0.79, 0.88, 0.82), 1.0),
        )
    }
    # -1, -2, -3 points: t(0.975, 2) · 1 / √3 = 4.303 / 1.732 = 2.48.
    paired = bench_async_learning.difference(found)
    assert paired.difference == pytest.approx(-0.02)
    assert (paired.low, paired.high) == pytest.approx((-0.0448, 0.0048), abs=1e-4)
    picture = tmp_path / "picture.png"
    bench_async_learning.draw(found, picture)
    assert picture.stat().st_size > 10_000
    text = bench_async_learning.markdown({"machine": MACHINE, "steps": 4}, found, picture.name)
    assert (
        "| synchronous | 80.0% | 90.0% | 85.0% | **85.0%** | 1,000 | 12 | 0% | 0.0 updates |"
        in text
    )
    assert "ahead less synchronous: -2.0 points, 95 % interval -4.5 … +0.5 (Student's t" in text


@pytest.mark.parametrize("mode", list(MODES))
def test_every_setting_of_the_benchmark_exists(mode: str) -> None:
    config = load_config(CONFIG, MODES[mode])
    assert config.rollout.async_steps == (mode != "synchronous")
