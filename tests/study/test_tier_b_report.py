"""The tables and the figure of tier B, from shards that were made up."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.study.shards import path_of
from examples.study.tier_b import Plan, Setting
from examples.study.tier_b_report import Results, draw, tables

RATE = 1e-4
ACCURACY = {"bapo": 0.8, "grpo": 0.7, "start": 0.79, "corner": 0.85, "yoked": 0.8}
LAG_COST = 0.01


def _row(setting: Setting) -> dict[str, Any]:
    """A run whose seeds differ alike in all arms, but for a little in each."""
    noise = 0.001 * (setting.seed * list(ACCURACY).index(setting.arm) % 5)
    accuracy = ACCURACY[setting.arm] - LAG_COST * setting.lag + 0.02 * setting.seed + noise
    searched = (0.6, 0.9) if setting.arm == "bapo" else (None, None)
    return {
        "arm": setting.arm,
        "lag": setting.lag,
        "learning_rate": setting.learning_rate,
        "seed": setting.seed,
        "accuracy_after": accuracy,
        **dict.fromkeys(("reward", "entropy", "gradient_norm"), (0.5, accuracy)),
        **dict.fromkeys(("clipped_high", "clipped_low"), (0.01, 0.02)),
        **dict.fromkeys(("low", "high", "positive_share", "exit_start", "exit_met"), searched),
    }


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three whole seeds and one of which a run is missing."""
    out = tmp_path_factory.mktemp("tier_b")
    (out / "report").mkdir()
    plan = Plan(rates=(RATE,), seeds=(0, 1, 2, 3), steps=2)
    for setting in plan.settings():
        if (setting.arm, setting.lag, setting.seed) != ("corner", 8, 3):
            table = pa.Table.from_pylist([_row(setting)])
            pq.write_table(table, path_of(out / "report", setting.name))
    shape = {"arms": list(ACCURACY), "lags": plan.lags, "rates": plan.rates, "seeds": plan.seeds}
    origin = [{"shards": 59, "commit": "0123abc", "torch": "2.13.0"}]
    manifest = {"plan": shape | {"steps": 2}, "made_with": origin}
    (out / "manifest.json").write_text(json.dumps(manifest))
    return out


def test_contrasts_are_paired_by_seed_over_the_stale_lags(study: Path) -> None:
    results = Results(study)
    assert results.seeds(RATE) == [0, 1, 2]
    difference = results.differences("grpo", [2, 8], RATE)
    assert difference == pytest.approx([0.1, 0.1, 0.1], abs=0.005)
    text = tables(results)
    assert f"| GRPO [0.8, 1.2] | {difference.mean():+.3f} | " in text
    assert "| 3 of 3 |" in text
    assert "| 3 seeds | lag 0 | lag 2 | lag 8 |" in text
    first, *_ = text.split("### What the runs did")
    assert first.index("### Contrasts, lag 2, 8") < first.index("### Contrasts, lag 0")


def test_the_figure_is_drawn(study: Path, tmp_path: Path) -> None:
    draw(Results(study), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 20_000
