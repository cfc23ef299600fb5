"""Trains the demo by several seeds, in order and ahead of training, and compares the learning.

make demo && python -m tests.benchmarks.bench_async_learning runs/demo-tiny-seed0
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.evaluation.estimators import PairedDifference, difference_over_seeds
from bapo_megatron.telemetry.sinks import read_metrics
from bapo_megatron.tools.sweep.file import PlannedRun
from tests.benchmarks.demo_runs import draw, train_variants
from tests.benchmarks.harness import finish, machine, page, report_arguments, table

MODES = {
    "synchronous": ["rollout.async_steps=0"],
    "one step ahead": [
        "rollout.async_steps=1",
        "rollout.oversample_groups=8",
        "rollout.tokens_per_step=6000",
        "rollout.stream_tokens=8",  # else most responses come whole, and the budget is seen late
    ],
}
ACCURACY = "eval/heldout/avg_at_k"
CURVES = {
    "reward/mean": "Mean reward of the batch",
    "rollout/stale_token_share": "Share of stale tokens",
    "rollout/age_mean": "Age of tokens in a new batch, mean (updates)",
    "rollout/age_max": "Age of tokens in a new batch, oldest (updates)",
}


Training = dict[str, Any]
"""One run of the demo; sums are over its steps."""


def read_run(run: PlannedRun) -> Training:
    rows = read_metrics(run.run_dir / "metrics.jsonl")
    return {
        "seed": run.seed,
        "accuracy": rows[-1][ACCURACY],
        "generated_tokens": sum(row["rollout/generated_tokens"] for row in rows),
        "resumed_samples": sum(row["rollout/resumed_samples"] for row in rows),
        "curves": {name: [row[name] for row in rows] for name in CURVES},
    }


def difference(trainings: dict[str, list[Training]]) -> PairedDifference:
    """Accuracy of the second mode less that of the first, paired by seed."""
    first_S, second_S = (np.array([t["accuracy"] for t in trainings[name]]) for name in MODES)
    return difference_over_seeds(second_S - first_S)


def markdown(report: dict[str, Any], trainings: dict[str, list[Training]], picture: str) -> str:
    seeds = [f"seed {training['seed']}" for training in trainings["synchronous"]]
    head = ["", *seeds, "mean", "tokens generated", "responses resumed", "stale tokens"]
    rows = []
    for name, of_mode in trainings.items():
        curves = [training["curves"] for training in of_mode]
        fields = ("accuracy", "generated_tokens", "resumed_samples")
        accuracy, generated, resumed = (
            statistics.mean(training[field] for training in of_mode) for field in fields
        )
        rows.append(
            [
                name,
                *(f"{training['accuracy']:.1%}" for training in of_mode),
                f"**{accuracy:.1%}**",
                f"{generated:,.0f}",
                f"{resumed:,.0f}",
                f"{_mean_of(curves, 'rollout/stale_token_share'):.0%}",
                f"{_mean_of(curves, 'rollout/age_mean'):.1f} updates",
                f"{max(max(curve['rollout/age_max']) for curve in curves):.0f} updates",
            ]
        )
    paired = difference(trainings)
    return page(
        "Learning from rollouts generated ahead of training",
        report["machine"],
        f"The demo on one rank, {report['steps']} steps, held-out accuracy at the end. *One step "
        f"ahead* is `{' '.join(MODES['one step ahead'])}`: what is unfinished at the end of a "
        "step's budget is aborted and continued by the next weights.",
        table([*head, "mean age", "oldest"], rows),
        f"One step ahead less synchronous: {100 * paired.difference:+.1f} points, 95 % interval "
        f"{100 * paired.low:+.1f} … {100 * paired.high:+.1f} (Student's t over paired seeds).",
        f"![Reward, stale tokens and ages]({picture})",
    )


def _mean_of(curves: list[dict[str, list[float]]], metric: str) -> float:
    return statistics.mean(value for curve in curves for value in curve[metric])


def main() -> None:
    parser = report_arguments(__doc__ or "", needs_out=True)
    parser.add_argument("data_dir", type=Path, help="what make-tiny wrote")
    parser.add_argument("settings", nargs="*", help="KEY=VALUE for both modes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    where = machine()
    with tempfile.TemporaryDirectory() as scratch:
        runs = train_variants(
            options.data_dir.resolve(),
            Path(scratch),
            MODES,
            common=["algorithm.updates_per_batch=4", *options.settings],
            seeds=options.seeds,
            steps=options.steps,
        )
        trainings = {name: [read_run(run) for run in of_mode] for name, of_mode in runs.items()}
    report = {
        "machine": where,
        "steps": options.steps,
        "settings": options.settings,
        "modes": trainings,
    }
    picture = options.out.with_suffix(".png")
    draw(
        CURVES, {name: [run["curves"] for run in runs] for name, runs in trainings.items()}, picture
    )
    finish(options.out, markdown(report, trainings, picture.name), report)


if __name__ == "__main__":
    main()
