"""The benchmark of predicted bounds: what it counts, and what it writes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bapo_megatron.algorithm.objectives.bapo import Bapo, BapoConfig
from tests.benchmarks import bench_speculation as bench
from tests.benchmarks.main_call import run_main

if TYPE_CHECKING:
    from pathlib import Path

NO_NEWS = "own weights, r = 1"


def _updates(bapo: Bapo, noise: float) -> bench.History:
    """Statistics of 40 updates of 400 tokens whose log-probs moved by ``noise``."""
    generator = torch.Generator().manual_seed(0)
    updates = []
    for _ in range(40):
        behaviour_T = -torch.rand(400, generator=generator)
        moved_T = behaviour_T + noise * torch.randn(400, generator=generator)
        advantage_T = torch.randn(400, generator=generator)
        mask_T = torch.ones(400)
        known_K, total_K = (
            bapo.search.contributions(policy_T, behaviour_T, advantage_T, mask_T)
            for policy_T in (behaviour_T, moved_T)
        )
        updates.append((known_K, total_K))
    return updates


def test_predictions_are_right_where_nothing_moved_and_cost_passes_where_they_are_not() -> None:
    bapo = Bapo(BapoConfig(), None)
    still = bench.score(_updates(bapo, 0.0), bapo, steps=20)
    assert still["hit_share"][NO_NEWS] == still["hit_share"][bench.SHIPPED] == 1.0
    # The first updates, in which `auto` relies on nothing, are not among the last 20.
    assert still["regret"][NO_NEWS] == 0.0
    assert sum(still["exits"].values()) == still["updates"] == 20
    moved = bench.score(_updates(bapo, 2.0), bapo, steps=20)
    assert moved["hit_share"][NO_NEWS] == 0.0
    assert moved["hit_share"][bench.SHIPPED] == 1.0


def test_regret_is_at_most_that_of_the_plain_order_once_misses_are_known() -> None:
    assert bench.regret([True] * 200, first=100) == pytest.approx(1 / bench.LOSS_SHARE)
    assert bench.regret([False] * 200, first=100) == 0.0


def test_a_report_has_every_lag_and_says_what_was_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times(*_: object) -> dict[str, float]:
        return {"never": 0.2, "always": 0.15, "auto": 0.16}

    monkeypatch.setattr(bench, "record", lambda *_: tmp_path)
    monkeypatch.setattr(bench, "read_updates", lambda _, bapo: _updates(bapo, 0.3))
    monkeypatch.setattr(bench, "time_modes", times)
    out = tmp_path / "report"
    run_main("bench_speculation", str(tmp_path), "--updates=20", f"--out={out}")
    report: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())
    for cells in report["cells"].values():
        assert list(cells) == [str(lag) for lag in bench.LAGS]
        assert all(
            400 < cell["simulated_s"] < report["plain_32b_s"] + 300 for cell in cells.values()
        )
    text = out.with_suffix(".md").read_text()
    assert "| `always`: ms per update | 150.0 (0.75) |" in text
    assert "bit for bit" in text
    assert out.with_suffix(".png").stat().st_size > 10_000
