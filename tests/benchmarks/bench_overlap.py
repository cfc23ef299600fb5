"""Trains the demo's task with and without generation ahead of training, and compares the steps.

make demo && python -m tests.benchmarks.bench_overlap runs/demo-tiny-seed0
"""

from __future__ import annotations

import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.demo_runs import train
from tests.benchmarks.harness import finish, machine, page, report_arguments, table

SETTINGS = ("eval.sets=[]", "algorithm.updates_per_batch=4")
MODES = {
    "async_steps 0": ["rollout.async_steps=0"],
    "async_steps 1": ["rollout.async_steps=1"],
}
WARM_UP = 2
"""Steps at the beginning that are left out: caches are cold and nothing is ahead yet."""
LAST = 1
"""Steps at the end that are left out: nothing is generated beyond the last one."""
PHASES = ("rollout", "training", "weight_sync")
OTHERS = (
    "throughput/generated_tokens_per_s",
    "rollout/response_tokens_mean",
    "rollout/resumed_samples",
    "rollout/staleness_mean",
    "rollout/staleness_max",
)


def train_once(data_dir: Path, settings: list[str], steps: int) -> list[dict[str, float]]:
    """The measured steps of one run: seconds by phase and of the whole, and what was generated."""
    with tempfile.TemporaryDirectory() as scratch:
        rows = train(
            Path(scratch) / "run", data_dir, WARM_UP + steps + LAST, [*SETTINGS, *settings]
        )
    measured = []
    for row in rows[WARM_UP:-LAST]:
        seconds = {phase: row[f"time/{phase}_s"] for phase in PHASES}
        measured.append(
            seconds
            | {"whole": sum(seconds.values())}
            | {name.partition("/")[2]: row[name] for name in OTHERS}
        )
    assert len(measured) == steps
    return measured


def measure(data_dir: Path, steps: int, rounds: int, common: list[str]) -> dict[str, Any]:
    """Let the modes take turns; by mode the medians over all steps, and those of single runs."""
    order = random.Random(0)
    measured: dict[str, list[list[dict[str, float]]]] = {name: [] for name in MODES}
    for _ in range(rounds):
        for name in order.sample(list(MODES), len(MODES)):
            measured[name].append(train_once(data_dir, [*common, *MODES[name]], steps))
    table: dict[str, Any] = {}
    for name, runs in measured.items():
        rows = [row for run in runs for row in run]
        medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        medians["staleness_max"] = max(row["staleness_max"] for row in rows)
        per_run = [statistics.median(row["whole"] for row in run) for run in runs]
        table[name] = {"median": medians, "rounds": per_run}
    return table


def hidden_share(table: dict[str, Any]) -> float:
    """What the overlap saves, over what it could save at most: the shorter of the two phases."""
    before, after = (table[name]["median"] for name in MODES)
    return (before["whole"] - after["whole"]) / min(before["rollout"], before["training"])


def markdown(report: dict[str, Any]) -> str:
    modes = report["modes"]
    first, second = (modes[name]["median"] for name in MODES)
    quantities = [
        ("**whole step**", "whole", "{:.2f} s"),
        ("waiting for the batch", "rollout", "{:.2f} s"),
        ("training", "training", "{:.2f} s"),
        ("weight sync", "weight_sync", "{:.2f} s"),
        ("generated tokens/s", "generated_tokens_per_s", "{:,.0f}"),
        ("mean response, tokens", "response_tokens_mean", "{:.1f}"),
        ("resumed requests", "resumed_samples", "{:.0f}"),
        ("age of trained tokens, mean (updates)", "staleness_mean", "{:.2f}"),
        ("age of trained tokens, largest", "staleness_max", "{:.0f}"),
    ]
    rows = [
        [label, *(style.format(modes[name]["median"][key]) for name in MODES)]
        for label, key, style in quantities
    ]
    spans = [f"{min(m['rounds']):.2f} – {max(m['rounds']):.2f} s" for m in modes.values()]
    return page(
        "Generation during training",
        report["machine"],
        f"The demo on one rank{''.join(f', {setting}' for setting in report['settings'])}: medians "
        f"over {report['steps']} steps of each of {report['rounds']} runs, which took turns.",
        table(["", *MODES], [*rows, ["whole step, run by run", *spans]]),
        f"A step takes {second['whole'] / first['whole']:.2f} times as long with generation beside "
        f"it; that hides {report['hidden_share']:.0%} of the shorter phase. Server and trainer "
        "share the machine's cores here, so that what one gains the other may lose; on GPUs of "
        "their own they do not (the simulation beside this file).",
    )


def main() -> None:
    parser = report_arguments(__doc__ or "")
    parser.add_argument("data_dir", type=Path, help="what make-tiny wrote")
    parser.add_argument("settings", nargs="*", help="KEY=VALUE for both modes")
    parser.add_argument("--steps", type=int, default=12, help="measured steps of a run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each mode")
    options = parser.parse_args()
    modes = measure(options.data_dir.resolve(), options.steps, options.rounds, options.settings)
    report = {
        "machine": machine(),
        "steps": options.steps,
        "rounds": options.rounds,
        "settings": options.settings,
        "modes": modes,
        "hidden_share": hidden_share(modes),
    }
    finish(options.out, markdown(report), report)


if __name__ == "__main__":
    main()
