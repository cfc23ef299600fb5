"""Trains the demo by several seeds, in order and ahead of training, and compares the learning.

make demo && python -m tests.benchmarks.bench_async_learning runs/demo-tiny-seed0
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bapo_megatron.evaluation.estimators import PairedDifference, difference_over_seeds
from bapo_megatron.telemetry.sinks import read_metrics
from bapo_megatron.tools.sweep.file import PlannedRun
from tests.benchmarks.harness import heading, machine, write_report
from tests.benchmarks.variants import train_variants

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


@dataclass(frozen=True, slots=True)
class Training:
    """One run of the demo."""

    seed: int
    accuracy: float
    """Held-out accuracy after the last step."""
    generated_tokens: float
    """Response tokens of the whole run."""
    resumed_samples: float
    """Requests of the whole run that continued a response."""
    curves: dict[str, list[float]]
    """By metric, one value per step."""


def read_run(run: PlannedRun) -> Training:
    """What a finished run has recorded."""
    rows = read_metrics(run.run_dir / "metrics.jsonl")
    return Training(
        seed=run.seed,
        accuracy=rows[-1][ACCURACY],
        generated_tokens=sum(row["rollout/generated_tokens"] for row in rows),
        resumed_samples=sum(row["rollout/resumed_samples"] for row in rows),
        curves={name: [row[name] for row in rows] for name in CURVES},
    )


def difference(found: dict[str, list[Training]]) -> PairedDifference:
    """Accuracy of the second mode less that of the first, paired by seed."""
    first_S, second_S = (np.array([t.accuracy for t in found[name]]) for name in MODES)
    return difference_over_seeds(second_S - first_S)


def draw(found: dict[str, list[Training]], out: Path) -> None:
    """One panel per curve, one colour per mode; thin lines are seeds, the thick one their mean."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    for axis, (metric, title) in zip(figure.subplots(2, 2).flat, CURVES.items(), strict=True):
        for number, (name, trainings) in enumerate(found.items()):
            curves = [training.curves[metric] for training in trainings]
            steps = range(1, len(curves[0]) + 1)
            for curve in curves:
                axis.plot(steps, curve, color=f"C{number}", linewidth=0.7, alpha=0.5)
            mean = [statistics.mean(values) for values in zip(*curves, strict=True)]
            axis.plot(steps, mean, color=f"C{number}", linewidth=2, label=name)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(out, dpi=120)


def markdown(report: dict[str, Any], found: dict[str, list[Training]], picture: str) -> str:
    """The report for people."""
    where = report["machine"]
    lines = [
        "# Learning from rollouts generated ahead of training",
        "",
        *heading(where),
        f"The demo on one rank, {report['steps']} steps, held-out accuracy at the end. *One step "
        f"ahead* is `{' '.join(MODES['one step ahead'])}`: what is unfinished at the end of a "
        "step's budget is aborted and continued by the next weights.",
        "",
        "| | " + " | ".join(f"seed {training.seed}" for training in found["synchronous"]) + " | "
        "mean | tokens generated | responses resumed | stale tokens | mean age | oldest |",
        "|---" * (len(found["synchronous"]) + 7) + "|",
    ]
    for name, trainings in found.items():
        curves = [training.curves for training in trainings]
        cells = [f"{training.accuracy:.1%}" for training in trainings]
        cells += [
            f"**{statistics.mean(training.accuracy for training in trainings):.1%}**",
            f"{statistics.mean(training.generated_tokens for training in trainings):,.0f}",
            f"{statistics.mean(training.resumed_samples for training in trainings):,.0f}",
            f"{_mean_of(curves, 'rollout/stale_token_share'):.0%}",
            f"{_mean_of(curves, 'rollout/age_mean'):.1f} updates",
            f"{max(max(curve['rollout/age_max']) for curve in curves):.0f} updates",
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    paired = difference(found)
    lines += [
        "",
        f"One step ahead less synchronous: {100 * paired.difference:+.1f} points, 95 % interval "
        f"{100 * paired.low:+.1f} … {100 * paired.high:+.1f} (Student's t over paired seeds).",
        "",
        f"![Reward, stale tokens and ages]({picture})",
    ]
    return "\n".join(lines) + "\n"


def _mean_of(curves: list[dict[str, list[float]]], metric: str) -> float:
    return statistics.mean(value for curve in curves for value in curve[metric])


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data_dir", type=Path, help="what make-tiny wrote")
    parser.add_argument("settings", nargs="*", help="KEY=VALUE for both modes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True, help="writes OUT.md, .json and .png")
    options = parser.parse_args()
    where = machine(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as scratch:
        runs = train_variants(
            options.data_dir.resolve(),
            Path(scratch),
            MODES,
            common=["algorithm.updates_per_batch=4", *options.settings],
            seeds=options.seeds,
            steps=options.steps,
        )
        found = {name: [read_run(run) for run in of_mode] for name, of_mode in runs.items()}
    report = {
        "machine": where,
        "steps": options.steps,
        "settings": options.settings,
        "modes": {name: [asdict(training) for training in runs] for name, runs in found.items()},
    }
    picture = options.out.with_suffix(".png")
    draw(found, picture)
    write_report(options.out, markdown(report, found, picture.name), report)


if __name__ == "__main__":
    main()
