"""Trains the tiny model on the calculator of tests/environment, an episode of two turns.

python -m tests.benchmarks.bench_episodes --out docs/benchmarks/episodes_cpu_202611
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bapo_megatron.telemetry.sinks import read_metrics
from tests.benchmarks.harness import REPOSITORY, heading, machine, write_report
from tests.environment.lessons import teach_two_turns
from tests.launch import run

CONFIG = REPOSITORY / "configs/demo.yaml"
SETTINGS = (
    "rollout.engine=local",
    "rollout.environment=tests.environment.calculator:Calculator",
    "rollout.episodes.max_turns=2",
    "rollout.episodes.workers=2",
    "reward.functions=[{name: total, function: 'tests.environment.calculator:Calculator.score'}]",
    "rollout.max_response_tokens=96",
    "eval.max_response_tokens=96",
    "parallel.tensor=1",
    "checkpoint.at_end=false",
    "log.console=false",
)
SCORE = "eval/heldout/avg_at_k"
CURVES = {
    "reward/mean": "Mean reward of the batch",
    "rollout/turns_mean": "Turns of the policy, mean",
    "rollout/response_tokens_mean": "Tokens that the policy sampled, mean",
    "rollout/environment_tokens_mean": "Tokens that the environment wrote, mean",
}


@dataclass(frozen=True, slots=True)
class Training:
    """One run."""

    seed: int
    before: tuple[float, float, float]
    """Held-out share of right sums before training, and the ends of its 95 % interval."""
    after: tuple[float, float, float]
    seconds: float
    curves: dict[str, list[float]]
    """By metric, one value per step."""


def train_once(scratch: Path, settings: list[str], seed: int, steps: int) -> Training:
    """Make a tiny model and train it."""
    tiny, run_dir = scratch / f"tiny{seed}", scratch / f"run{seed}"
    made = run(["make-tiny", str(tiny), "--seed", str(seed)], timeout_s=1200)
    assert made.returncode == 0, made.stderr
    teach_two_turns(tiny / "model", seed)
    arguments = [
        "train",
        str(CONFIG),
        f"run_dir={run_dir}",
        f"seed={seed}",
        f"model.path={tiny}/model",
        f"data.train.path={tiny}/train.jsonl",
        f"eval.sets=[{{path: {tiny}/heldout.jsonl, name: heldout}}]",
        f"train.steps={steps}",
        "rollout.async_steps=0",
        "algorithm.updates_per_batch=4",
        *SETTINGS,
        *settings,
    ]
    result = run(arguments, timeout_s=600 + 60 * steps)
    assert result.returncode == 0, result.stderr
    rows = read_metrics(run_dir / "metrics.jsonl")
    trained = [row for row in rows if "train/lr" in row]
    evaluated = [row for row in rows if SCORE in row]

    def score(row: dict[str, float]) -> tuple[float, float, float]:
        return row[SCORE], row[f"{SCORE}_low"], row[f"{SCORE}_high"]

    return Training(
        seed=seed,
        before=score(evaluated[0]),
        after=score(evaluated[-1]),
        seconds=sum(
            value for row in rows for name, value in row.items() if name.startswith("time/")
        ),
        curves={name: [row[name] for row in trained] for name in CURVES},
    )


def draw(trainings: list[Training], out: Path) -> None:
    """One panel per curve, one line per seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    for axis, (metric, title) in zip(figure.subplots(2, 2).flat, CURVES.items(), strict=True):
        for training in trainings:
            curve = training.curves[metric]
            axis.plot(range(1, len(curve) + 1), curve, label=f"seed {training.seed}")
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(out, dpi=120)


def markdown(report: dict[str, Any], trainings: list[Training], picture: str) -> str:
    """The report for people."""
    gains = [training.after[0] - training.before[0] for training in trainings]
    lines = [
        "# An episode of two turns",
        "",
        *heading(report["machine"]),
        f"The tiny model on `tests/environment/calculator.py`, engine local, {report['steps']} "
        "steps on one rank, after a supervised lesson on written-out episodes "
        "(`tests/environment/lessons.py`), since its warm-up knows one turn only. Held-out share "
        "of right results, 95 % intervals over problems.",
        "",
        "| seed | before | after | gain |",
        "|---|---|---|---|",
    ]
    for training, gain in zip(trainings, gains, strict=True):
        before, after = (
            f"{value:.1%} ({low:.1%} – {high:.1%})"
            for value, low, high in (training.before, training.after)
        )
        lines.append(f"| {training.seed} | {before} | {after} | {100 * gain:+.1f} points |")
    lines += [
        "",
        f"Mean gain {100 * statistics.mean(gains):+.1f} points.",
        "",
        f"![Reward, turns and tokens]({picture})",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", nargs="*", help="KEY=VALUE for every run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True, help="writes OUT.md, .json and .png")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        trainings = []
        for seed in range(options.seeds):
            training = train_once(Path(scratch), options.settings, seed, options.steps)
            print(f"seed {seed}: {training.before[0]:.1%} → {training.after[0]:.1%}", flush=True)  # noqa: T201
            trainings.append(training)
    report = {
        "machine": machine(torch.device("cpu")),
        "steps": options.steps,
        "settings": options.settings,
        "runs": [asdict(training) for training in trainings],
    }
    picture = options.out.with_suffix(".png")
    draw(trainings, picture)
    write_report(options.out, markdown(report, trainings, picture.name), report)


if __name__ == "__main__":
    main()
