"""Trains the tiny model on the calculator of tests/environment, an episode of two turns.

python -m tests.benchmarks.bench_episodes --out docs/benchmarks/episodes_cpu_202611
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

from examples.tiny.make import make_tiny
from tests.benchmarks.demo_runs import draw, train
from tests.benchmarks.harness import finish, machine, page, report_arguments, table
from tests.environment.lessons import teach_two_turns

SETTINGS = (
    "rollout.engine=local",
    "rollout.environment=tests.environment.calculator:Calculator",
    "rollout.episodes.max_turns=2",
    "rollout.episodes.workers=2",
    "reward.functions=[{name: total, function: 'tests.environment.calculator:Calculator.score'}]",
    "rollout.max_response_tokens=96",
    "eval.max_response_tokens=96",
    "rollout.async_steps=0",
    "algorithm.updates_per_batch=4",
)
SCORE = "eval/heldout/avg_at_k"
CURVES = {
    "reward/mean": "Mean reward of the batch",
    "rollout/turns_mean": "Turns of the policy, mean",
    "rollout/response_tokens_mean": "Tokens that the policy sampled, mean",
    "rollout/environment_tokens_mean": "Tokens that the environment wrote, mean",
}


def make_taught(scratch: Path, seed: int) -> Path:
    """Make a tiny model that knows two turns, and its data; returns their directory."""
    tiny = scratch / f"tiny{seed}"
    make_tiny(tiny, seed)
    teach_two_turns(tiny / "model", seed)
    return tiny


def train_once(scratch: Path, seed: int, steps: int) -> dict[str, Any]:
    """Make a tiny model and train it; before and after are shares with their 95 % intervals."""
    tiny = make_taught(scratch, seed)
    rows = train(scratch / f"run{seed}", tiny, steps, [f"seed={seed}", *SETTINGS])
    trained = [row for row in rows if "train/lr" in row]
    evaluated = [row for row in rows if SCORE in row]

    def score(row: dict[str, float]) -> tuple[float, float, float]:
        return row[SCORE], row[f"{SCORE}_low"], row[f"{SCORE}_high"]

    return {
        "seed": seed,
        "before": score(evaluated[0]),
        "after": score(evaluated[-1]),
        "curves": {name: [row[name] for row in trained] for name in CURVES},
    }


def markdown(report: dict[str, Any], picture: str) -> str:
    rows, gains = [], []
    for training in report["runs"]:
        before, after = (
            f"{value:.1%} ({low:.1%} – {high:.1%})"
            for value, low, high in (training["before"], training["after"])
        )
        gains.append(training["after"][0] - training["before"][0])
        rows.append((training["seed"], before, after, f"{100 * gains[-1]:+.1f} points"))
    return page(
        "An episode of two turns",
        report["machine"],
        f"The tiny model on `tests/environment/calculator.py`, engine local, {report['steps']} "
        "steps on one rank, after a supervised lesson on written-out episodes "
        "(`tests/environment/lessons.py`), since its warm-up knows one turn only. Held-out share "
        "of right results, 95 % intervals over problems.",
        table(("seed", "before", "after", "gain"), rows),
        f"Mean gain {100 * statistics.mean(gains):+.1f} points.",
        f"![Reward, turns and tokens]({picture})",
    )


def main() -> None:
    parser = report_arguments(__doc__ or "", needs_out=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        seeds = range(options.seeds)
        trainings = [train_once(Path(scratch), seed, options.steps) for seed in seeds]
    report = {"machine": machine(), "steps": options.steps, "runs": trainings}
    picture = options.out.with_suffix(".png")
    runs = {f"seed {training['seed']}": [training["curves"]] for training in trainings}
    draw(CURVES, runs, picture)
    finish(options.out, markdown(report, picture.name), report)


if __name__ == "__main__":
    main()
