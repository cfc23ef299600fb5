"""Tier A of the study: thousands of exactly solvable runs; resumable.

    python -m examples.study.tier_a --out docs/study/tier_a

First the learning rate of each arm is tuned on separate tasks and seeds; then every arm runs on
fresh tasks, at two fixed learning rates and at its best one.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from examples.study.shards import Shard, best_rates, read_shards, run_shards, write_manifest
from examples.study.tier_a_run import ARMS, History, Setting, train

PRIMARY_LAGS = (2, 4, 8)
"""Steps of lag over which the four contrasts are averaged."""
CONTRASTS = ("grpo", "start", "corner", "yoked")
"""Controls that BAPO is compared with; fixed beforehand."""
_RATIO_CLIPS = ("grpo", "clip_higher", "start", "corner", "bapo", "bapo_gradient", "yoked")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run."""

    arms: tuple[str, ...] = tuple(ARMS)
    lags: tuple[int, ...] = (0, 1, 2, 4, 8)
    updates: tuple[int, ...] = (1, 4, 64)
    """Updates per step besides 16, without lag."""
    rates: tuple[float, ...] = (0.03, 0.1)
    tuned_rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)
    targets: tuple[float, ...] = (0.3, 0.35, 0.45, 0.5)
    """ρ0 besides 0.4."""
    tasks: tuple[int, ...] = tuple(range(8))
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    tuning_tasks: tuple[int, ...] = (100, 101)
    tuning_seeds: tuple[int, ...] = (0, 1)
    steps: int = 60

    def tuning(self) -> list[Setting]:
        """The settings from which each arm's learning rate is chosen."""
        return [
            Setting(arm, lag, learning_rate=rate, steps=self.steps)
            for arm in self.arms
            for lag in self.lags
            for rate in self.tuned_rates
        ]

    def report(self, best: dict[tuple[str, int], float]) -> list[Setting]:
        """All settings that are reported, given the best learning rate by arm and lag.

        Those of the four contrasts come first.
        """
        at_best = [
            Setting(arm, lag, 16, rate, steps=self.steps) for (arm, lag), rate in best.items()
        ]
        contrasted = ("bapo", *CONTRASTS)
        at_best.sort(
            key=lambda setting: (setting.arm not in contrasted, setting.lag not in PRIMARY_LAGS)
        )
        regimes = [(lag, 16) for lag in self.lags] + [(0, updates) for updates in self.updates]
        settings = at_best + [
            Setting(arm, lag, updates, rate, steps=self.steps)
            for arm in self.arms
            for lag, updates in regimes
            for rate in self.rates
        ]
        stale = [lag for lag in (2, 8) if lag in self.lags]
        for lag in stale:
            for rate in self.rates:
                bapo = Setting("bapo", lag, 16, rate, steps=self.steps)
                settings += [
                    replace(bapo, arm=arm, dual_clip=3.0)
                    for arm in _RATIO_CLIPS
                    if arm in self.arms
                ]
                settings += [replace(bapo, target=target) for target in self.targets]
                settings.append(replace(bapo, micro_batches=4))
        return list(dict.fromkeys(settings))


SMALL = Plan(
    arms=("grpo", *CONTRASTS[1:], "bapo"),
    lags=(0, 2),
    updates=(),
    rates=(0.1,),
    tuned_rates=(0.03, 0.1),
    targets=(),
    tasks=(0, 1),
    seeds=(0, 1),
    tuning_tasks=(100,),
    tuning_seeds=(0,),
    steps=3,
)
"""A plan of seconds, for a first look and for the tests."""


def name_of(setting: Setting) -> str:
    """The name of a setting's shard."""
    parts = [setting.arm, f"lag{setting.lag}", f"updates{setting.updates}"]
    parts.append(f"lr{setting.learning_rate:g}")
    if setting.dual_clip is not None:
        parts.append(f"dual{setting.dual_clip:g}")
    if setting.target is not None:
        parts.append(f"target{setting.target:g}")
    if setting.micro_batches > 1:
        parts.append(f"micro{setting.micro_batches}")
    return "_".join(parts)


def compute(
    setting: Setting, tasks: tuple[int, ...], seeds: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Every run of a setting."""
    return [
        asdict(setting) | {"task": task, "seed": seed} | row_of(train(setting, task, seed))
        for task in tasks
        for seed in seeds
    ]


def row_of(run: History) -> dict[str, Any]:
    """The columns of a run: curves as lists, the rest as numbers."""
    return {
        "expected_reward": np.float32(run.expected_reward).tolist(),
        "entropy": np.float32(run.entropy).tolist(),
        "gradient_norm": np.float32(run.gradient_norm).tolist(),
        "median_gradient_norm": np.float32(run.median_gradient_norm).tolist(),
        "num_updates": run.num_updates,
        "num_searches": run.num_searches,
    } | run.means()


def run_plan(plan: Plan, out: Path, jobs: int) -> None:
    """Compute what is missing."""

    def run(settings: list[Setting], name: str, *over: tuple[int, ...]) -> Path:
        shards = [Shard(name_of(setting), compute, (setting, *over)) for setting in settings]
        run_shards(shards, out / name, jobs)
        return out / name

    tuning = run(plan.tuning(), "tuning", plan.tuning_tasks, plan.tuning_seeds)
    best = best_rates(read_shards(tuning), "arm", "lag")
    report = run(plan.report(best), "report", plan.tasks, plan.seeds)
    rates = {f"{arm}_lag{lag}": rate for (arm, lag), rate in best.items()}
    files = [path for part in (tuning, report) for path in part.glob("*.parquet")]
    write_manifest(out, {"plan": asdict(plan), "best_rates": rates}, files)


def main() -> None:
    """Run what is missing of the plan."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--small", action="store_true", help="a few short runs, for a look")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    run_plan(SMALL if options.small else Plan(), options.out, options.jobs)


if __name__ == "__main__":
    main()
