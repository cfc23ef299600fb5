"""Tier D of the study: score centering and biased samplers on tier A's tasks; resumable.

    python -m examples.study.tier_d --out docs/study/tier_d

The plan is registered in docs/study/tier_d.md. First the learning rate of each arm and condition
is tuned on separate tasks, then every arm runs on fresh ones.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from examples.study.shards import Shard, best_rates, path_of, run_shards, write_manifest
from examples.study.tier_d_run import ARMS, Setting, train

Condition = tuple[int, int]
"""Bits of the sampler (0: exact) and lag in steps."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run."""

    arms: tuple[str, ...] = ARMS
    conditions: tuple[Condition, ...] = (
        *((0, 0), (0, 2), (0, 4), (0, 8)),
        *((8, 0), (8, 8)),
        *((4, 0), (4, 4), (4, 8)),
    )
    rates: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1)
    tasks: tuple[int, ...] = tuple(range(16, 24))
    seeds: tuple[int, ...] = (0, 1)
    tuning_tasks: tuple[int, ...] = (200, 201)
    tuning_seeds: tuple[int, ...] = (0,)
    steps: int = 60

    def settings(self, arm: str) -> list[Setting]:
        """The conditions of an arm."""
        return [Setting(arm, lag, bits, steps=self.steps) for bits, lag in self.conditions]


SMALL = Plan(
    conditions=((0, 2), (0, 4), (0, 8), (4, 0), (4, 4), (4, 8)),
    rates=(0.03, 0.1),
    tasks=(16, 17),
    tuning_tasks=(200,),
    steps=2,
)
"""A plan of seconds, for a first look and for the tests."""


def compute(
    settings: list[Setting], tasks: tuple[int, ...], seeds: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Every run of some settings."""
    return [
        asdict(setting) | {"task": task, "seed": seed} | train(setting, task, seed).row()
        for setting in settings
        for task in tasks
        for seed in seeds
    ]


def run_plan(plan: Plan, out: Path, jobs: int) -> None:
    """Compute what is missing: a shard per arm, for tuning and then for the report."""
    tuning = {
        arm: [
            replace(setting, learning_rate=rate)
            for setting in plan.settings(arm)
            for rate in plan.rates
        ]
        for arm in plan.arms
    }
    over = (plan.tuning_tasks, plan.tuning_seeds)
    run_shards(
        [Shard(arm, compute, (settings, *over)) for arm, settings in tuning.items()],
        out / "tuning",
        jobs,
    )
    best = {
        arm: best_rates(pq.read_table(path_of(out / "tuning", arm)).to_pylist(), "bits", "lag")
        for arm in plan.arms
    }
    report = {
        arm: [
            replace(setting, learning_rate=best[arm][setting.bits, setting.lag])
            for setting in plan.settings(arm)
        ]
        for arm in plan.arms
    }
    over = (plan.tasks, plan.seeds)
    run_shards(
        [Shard(arm, compute, (settings, *over)) for arm, settings in report.items()],
        out / "report",
        jobs,
    )
    files = [path_of(out / part, arm) for part in ("tuning", "report") for arm in plan.arms]
    write_manifest(out, {"plan": asdict(plan)}, files)


def main() -> None:
    """Run what is missing of the plan."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="a few short runs, for a look")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    run_plan(SMALL if options.small else Plan(), options.out, options.jobs)


if __name__ == "__main__":
    main()
