"""Trains the demo's task with every objective and advantage that has a name, by several seeds.

    make demo
    python -m tests.benchmarks.objective_table runs/demo-tiny-seed0 --runs runs/objectives \
        --out docs/benchmarks/objectives_cpu_202611

The runs, on the local engine, are a sweep under ``--runs``: finished ones are not made again, so
the command can be interrupted and repeated.
"""

import statistics
from pathlib import Path
from typing import Any

from bapo_megatron.config.schema import OBJECTIVES
from bapo_megatron.telemetry.sinks import read_metrics
from tests.benchmarks.demo_runs import train_variants
from tests.benchmarks.harness import finish, machine, page, report_arguments, table

SEQUENCE_MEAN = ("sapo", "gspo", "gmpo")
"""Objectives that are published with the mean over responses."""
NEED_FRESH_TOKENS = ("reinforce", "ce_gppo", "clip, geometric")
"""What falls behind or collapses on the demo's old tokens is trained on fresh ones too."""
FRESH = ("rollout.async_steps=0", "algorithm.updates_per_batch=4")
ACCURACY = "eval/heldout/avg_at_k"
LAST_STEPS = 10
"""Steps at the end over which the reward is averaged."""


def _arms() -> dict[str, list[str]]:
    """Overrides of each arm, by what docs/objectives.md calls it."""
    arms = {name: [f"algorithm.objective={name}"] for name in OBJECTIVES}
    for name in SEQUENCE_MEAN:
        arms[name].append("algorithm.loss_aggregation=sequence_mean")
    clip = ["algorithm.objective=clip"]
    arms["clip, dual_clip 3"] = [*clip, "algorithm.dual_clip=3"]
    arms["clip, entropy_share 0.2"] = [*clip, "algorithm.entropy_share=0.2"]
    for advantage in ("rloo", "opo", "reinforce_pp", "reinforce_pp_baseline"):
        arms[f"clip, {advantage}"] = [*clip, f"algorithm.advantage={advantage}"]
    arms["AsymRE"] = [
        *("algorithm.objective=reinforce", "algorithm.advantage=grpo_no_std"),
        "algorithm.baseline_shift=-0.1",
    ]
    arms["clip, geometric"] = [
        *(*clip, "algorithm.behaviour=recomputed"),
        "algorithm.correction.kind=geometric",
    ]
    return arms | {f"{name}, fresh": [*arms[name], *FRESH] for name in NEED_FRESH_TOKENS}


ARMS = _arms()


def read_run(metrics: Path, seed: int) -> dict[str, float]:
    """Summarise a run from its metrics.

    ``without_gradient`` is the share of trained tokens with A ≠ 0 whose derivative is 0, mean over
    steps and signs.
    """
    rows = read_metrics(metrics)
    shares = [
        row[f"clip/fraction_{sign}"]
        for row in rows
        for sign in ("positive", "negative")
        if f"clip/fraction_{sign}" in row
    ]
    return {
        "seed": seed,
        "accuracy": rows[-1][ACCURACY],
        "reward": statistics.mean(row["reward/mean"] for row in rows[-LAST_STEPS:]),
        "without_gradient": statistics.mean(shares),
        "wall_s": sum(v for row in rows for name, v in row.items() if name.startswith("time/")),
    }


COLUMNS = {
    "mean": "**{accuracy:.1%}**",
    "reward": "{reward:.3f}",
    "without gradient": "{without_gradient:.1%}",
    "time": "{wall_s:.0f} s",
}


def markdown(report: dict[str, Any], arms: dict[str, list[dict[str, float]]]) -> str:
    seeds = [f"seed {trained['seed']}" for trained in next(iter(arms.values()))]
    rows = []
    for name, runs in arms.items():
        mean = {key: statistics.mean(trained[key] for trained in runs) for key in runs[0]}
        accuracies = (f"{trained['accuracy']:.1%}" for trained in runs)
        rows.append([name, *accuracies, *(text.format(**mean) for text in COLUMNS.values())])
    return page(
        "Every objective on the demo's task",
        report["machine"],
        f"{report['steps']} steps of configs/demo.yaml on one rank with the local engine; held-out "
        f"accuracy at the end, the batch's reward over the last {LAST_STEPS} steps, trained tokens "
        "without a gradient (mean over signs, updates and steps). Tokens are some 40 updates old, "
        "at most 3 where an arm is *fresh*: objectives that limit nothing, or little, fall behind "
        "or collapse on old tokens. One model and a few seeds show that each objective trains, not "
        "which of the others is better; times are of a machine with other work.",
        table(["arm", *seeds, *COLUMNS], rows),
        "Overrides of the arms:",
        [f"- {name}: `{' '.join(ARMS[name])}`" for name in arms],
    )


def main() -> None:
    parser = report_arguments(__doc__ or "", needs_out=True)
    parser.add_argument("data_dir", type=Path, help="what examples.tiny wrote")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--runs", type=Path, required=True, help="directory of the runs")
    options = parser.parse_args()
    where = machine()
    runs = train_variants(
        options.data_dir.resolve(),
        options.runs.resolve(),
        ARMS,
        common=["rollout.engine=local"],
        seeds=options.seeds,
        steps=options.steps,
    )
    arms = {
        name: [read_run(run.run_dir / "metrics.jsonl", run.seed) for run in of_arm]
        for name, of_arm in runs.items()
    }
    report = {"machine": where, "steps": options.steps, "arms": arms}
    finish(options.out, markdown(report, arms), report)


if __name__ == "__main__":
    main()
