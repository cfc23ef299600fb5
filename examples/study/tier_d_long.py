"""Tier D's long runs: does entropy rise where bounds sit at their maxima? Resumable.

    python -m examples.study.tier_d_long docs/study/tier_d

The plan is registered in docs/study/tier_d.md. Learning rates are those of tier D's tuning.

Shape legend: I = tasks.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bapo_megatron.evaluation.estimators import difference_over_seeds, holm
from bapo_megatron.runtime.files import atomic_write_text
from examples.study.shards import Shard, best_rates, read_shards, run_shards
from examples.study.tier_d_run import CURVE_STEPS, Setting, train

if TYPE_CHECKING:
    from numpy.typing import NDArray

ARMS = ("grpo", "corner", "bapo", "yoked")
LAGS = (0, 4, 8)
TASKS = tuple(range(24, 32))
STEPS, EARLY = 1200, 60
"""Steps of a run, and the step from which its entropy is compared."""
_EARLY_POINT = EARLY // CURVE_STEPS - 1
"""Its place in a curve of entropy, which has no point before the first step."""
MAXIMA = (0.9, 3.0)
CONTRASTS = ("bapo", "corner", "bapo − grpo", "bapo − corner", "bapo − yoked")


def compute(arm: str, rates: dict[int, float]) -> list[dict[str, Any]]:
    """Every run of an arm."""
    rows = []
    for lag, rate in rates.items():
        setting = Setting(arm, lag, learning_rate=rate, steps=STEPS)
        for task in TASKS:
            history = train(setting, task, 0)
            late = history.bounds[len(history.bounds) * EARLY // STEPS :]
            share = np.mean([np.allclose(pair, MAXIMA) for pair in late]) if late else None
            rows.append(asdict(setting) | {"task": task, "at_maxima": share} | history.row())
    return rows


def run_all(directory: Path, jobs: int) -> None:
    """Compute what is missing: a shard per arm."""
    best = best_rates(read_shards(directory / "tuning"), "arm", "bits", "lag")
    shards = [Shard(arm, compute, (arm, {lag: best[arm, 0, lag] for lag in LAGS})) for arm in ARMS]
    run_shards(shards, directory / "long", jobs)


def rise(rows: list[dict[str, Any]], arm: str, lags: tuple[int, ...] = LAGS) -> NDArray[np.float64]:
    """Entropy at the end minus that after step ``EARLY``, nats, mean over lags, [I]."""
    chosen = [[row for row in rows if (row["arm"], row["lag"]) == (arm, lag)] for lag in lags]
    rises = [
        [
            row["entropy"][-1] - row["entropy"][_EARLY_POINT]
            for row in sorted(of, key=lambda row: row["task"])
        ]
        for of in chosen
    ]
    mean_I: NDArray[np.float64] = np.mean(rises, axis=0)
    return mean_I


def tables(rows: list[dict[str, Any]]) -> str:
    """The markdown."""
    values = [
        rise(rows, first) - (rise(rows, second) if second else 0)
        for first, _, second in (contrast.partition(" − ") for contrast in CONTRASTS)
    ]
    effects = [difference_over_seeds(value_I) for value_I in values]
    corrected = holm([effect.p_value for effect in effects])
    lines = [
        "# Tier D: long runs",
        "",
        "Made by `python -m examples.study.tier_d_long` from the shards in long/. "
        "[What it means](../tier_d.md#long-runs).",
        "",
        f"| rise of entropy from step {EARLY}, nats | mean | 95 % interval | p | corrected |",
        "|---" * 5 + "|",
        *(
            f"| {name} | {effect.difference:+.3f} | {effect.low:+.3f} … {effect.high:+.3f} | "
            f"{effect.p_value:.2g} | {p_value:.2g} |"
            for name, effect, p_value in zip(CONTRASTS, effects, corrected, strict=True)
        ),
        "",
        "| arm, lag | rise | highest after the early step | expected reward early, at the end | "
        "updates with both bounds at their maxima |",
        "|---" * 5 + "|",
    ]
    for arm in ARMS:
        for lag in LAGS:
            of = [row for row in rows if (row["arm"], row["lag"]) == (arm, lag)]
            later = [row["entropy"][_EARLY_POINT:] for row in of]
            top = np.mean([max(curve) - curve[0] for curve in later])
            points = (_EARLY_POINT + 1, -1)  # rewards are of the start, too
            reward = [np.mean([row["expected_reward"][n] for row in of]) for n in points]
            share = "" if arm == "grpo" else f"{np.mean([row['at_maxima'] for row in of]):.0%}"
            lines.append(
                f"| {arm}, {lag} | {rise(rows, arm, (lag,)).mean():+.3f} | {top:+.3f} | "
                f"{reward[0]:.3f}, {reward[1]:.3f} | {share} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is missing, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    run_all(options.directory, options.jobs)
    atomic_write_text(
        options.directory / "long.md", tables(read_shards(options.directory / "long"))
    )


if __name__ == "__main__":
    main()
