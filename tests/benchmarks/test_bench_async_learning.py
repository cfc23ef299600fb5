"""The arithmetic of the benchmark of asynchronous learning; the runs themselves are replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo_megatron.config.load import load_config
from tests.benchmarks import bench_async_learning
from tests.benchmarks.bench_async_learning import CURVES, MODES, Training

MACHINE = {
    "date": "2026-11-21",
    "commit": "abc",
    "processor": "CPU",
    "python": "3.11",
    "packages": {"torch": "2", "megatron-core": "0"},
    "command": "python -m tests.benchmarks.bench_async_learning",
}


@pytest.mark.slow
def test_modes_are_compared_by_the_welch_standard_error_and_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train_once(data_dir: Path, settings: list[str], seed: int, steps: int) -> Training:
        is_ahead = "rollout.async_steps=1" in settings
        accuracy = [0.80, 0.90, 0.85][seed] - (0.02 if is_ahead else 0.0)
        curves = {name: [float(is_ahead)] * steps for name in CURVES}
        return Training(seed, accuracy, 1000.0, 12.0, curves)

    monkeypatch.setattr(bench_async_learning, "train_once", train_once)
    found = bench_async_learning.measure(Path("data"), seeds=3, steps=4, common=[])
    mean, error = bench_async_learning.difference(found)
    assert mean == pytest.approx(-0.02)
    assert error == pytest.approx((2 * 0.0025 / 3) ** 0.5)  # both variances are 0.05²
    picture = tmp_path / "picture.png"
    bench_async_learning.draw(found, picture)
    assert picture.stat().st_size > 10_000
    text = bench_async_learning.markdown({"machine": MACHINE, "steps": 4}, found, picture.name)
    assert (
        "| synchronous | 80.0% | 90.0% | 85.0% | **85.0%** | 1,000 | 12 | 0% | 0.0 updates |"
        in text
    )
    assert "One step ahead less synchronous: -2.0 points, standard error 4.1." in text


@pytest.mark.parametrize("mode", list(MODES))
def test_every_setting_of_the_benchmark_exists(mode: str) -> None:
    config = load_config(bench_async_learning.CONFIG, MODES[mode])
    assert config.rollout.async_steps == (mode != "synchronous")
