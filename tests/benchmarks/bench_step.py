"""Replays the batches of a run and says where the time of a training step goes.

make demo && python -m tests.benchmarks.bench_step runs/demo [KEY=VALUE …]
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

from bapo_megatron.telemetry.sinks import read_metrics
from tests.benchmarks.harness import finish, machine, page, report_arguments, table
from tests.benchmarks.step_ranks import PARTS, profile_steps
from tests.distributed_launch import run_ranks

LAYOUTS = {
    "one rank": (1, []),
    "TP 2": (2, ["parallel.tensor=2"]),
    "PP 2": (2, ["parallel.pipeline=2"]),
    "DP 2": (2, []),
}
WARM_UP = 2
"""Steps that are left out."""


def measure(run_dir: Path, steps: int, further: list[str]) -> dict[str, dict[str, float]]:
    """Median seconds per step on rank 0 of every part, by layout."""
    table = {}
    for name, (ranks, overrides) in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as scratch:
            settings = [
                f"run_dir={scratch}/run",
                f"replay={run_dir}/rollouts",
                f"train.steps={steps + WARM_UP}",
                "checkpoint.at_end=false",
                "log.console=false",
                "parallel.tensor=1",
                "parallel.pipeline=1",
                *overrides,
                *further,
            ]
            config = run_dir / "config.yaml"
            (first, *_) = run_ranks(profile_steps, ranks, settings, config, timeout_s=1800)
        rows = first[WARM_UP:]
        for row in rows:
            row["the rest"] = row["whole"] - sum(row.get(label, 0.0) for label in PARTS)
        table[name] = {label: _median(rows, label) for label in (*PARTS, "the rest", "whole")}
    return table


def _median(rows: list[dict[str, float]], label: str) -> float:
    return statistics.median(row.get(label, 0.0) for row in rows)


def _markdown(report: dict[str, Any]) -> str:
    by_layout = report["seconds"]
    rows = [
        [
            label,
            *(f"{s[label] * 1e3:.1f} ({s[label] / s['whole']:.0%})" for s in by_layout.values()),
        ]
        for label in (*PARTS, "the rest", "whole")
    ]
    return page(
        "Where the time of a training step goes",
        report["machine"],
        f"The batches of the demo (256 responses, {report['updates']:.0f} updates per step) are "
        f"replayed{''.join(f', {s}' for s in report['settings'])}; medians over {report['steps']} "
        "steps on rank 0, in ms, and the share of the whole. Generation and the "
        "servers' loading are not part of it.",
        table(["", *by_layout], rows),
    )


def main() -> None:
    parser = report_arguments(__doc__ or "")
    parser.add_argument("run_dir", type=Path, help="a finished run of the demo")
    parser.add_argument("settings", nargs="*", help="KEY=VALUE for all layouts")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    report = {
        "machine": machine(),
        "steps": options.steps,
        "settings": options.settings,
        "updates": read_metrics(options.run_dir / "metrics.jsonl")[-1]["train/updates"],
        "seconds": measure(options.run_dir, options.steps, options.settings),
    }
    finish(options.out, _markdown(report), report)


if __name__ == "__main__":
    main()
