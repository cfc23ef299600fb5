"""Trains from the same dumps in every layout, and writes how far each is from one rank."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.benchmarks.harness import columns, finish, machine, page, report_arguments
from tests.distributed_launch import run_ranks
from tests.trainer.dumps import make_random_model, replay_settings, write_dump_shapes
from tests.trainer.layout_ranks import CASES, Case, Outcome, train_in, with_references

STEPS = 10
COMPARED = {"loss": "loss/policy", "gradient norm": "policy/grad_norm"}
BOUNDS = ("clip/low", "clip/high")
COLUMNS = {
    "layout": "{layout}",
    "ranks": "{ranks}",
    "loss": "{loss:.1e}",
    "gradient norm": "{gradient norm:.1e}",
    "weights": "{weights:.1e}",
    "bounds": "{bounds}",
    "imbalance": "{imbalance:.2f}",
    "packed": "{packed:.0%}",
}


def measure(root: Path) -> list[dict[str, Any]]:
    """Train every case; one row of the table for each."""
    model = make_random_model(root / "model")
    dumps = write_dump_shapes(root / "dumps", model, steps=STEPS)
    config = root / "replay.yaml"
    config.write_text(yaml.safe_dump(replay_settings(model, dumps["mixed"], root / "run")))
    outcomes: dict[str, Outcome] = {}
    for ranks in (1, 2, 4):
        arguments = (with_references(ranks), config, dumps, root / str(ranks))
        outcomes |= run_ranks(train_in, ranks, *arguments, timeout_s=1800)[0]
    return [_compare(case, outcomes[case.name], outcomes[case.reference.name]) for case in CASES]


def _compare(case: Case, outcome: Outcome, expected: Outcome) -> dict[str, Any]:
    rows = outcome.rows
    pairs = list(zip(rows, expected.rows, strict=True))
    largest = {
        label: max(abs(row[name] - ref[name]) / max(abs(ref[name]), 1.0) for row, ref in pairs)
        for label, name in COMPARED.items()
    }
    return {
        "layout": case.name,
        "ranks": case.ranks,
        "settings": " ".join((*case.overrides, *case.algorithm)),
        "steps": len(pairs),
        **largest,
        "weights": max(
            float((weight - expected.weights[name]).abs().max())
            for name, weight in outcome.weights.items()
        ),
        "bounds": "equal"
        if all(row[name] == ref[name] for row, ref in pairs for name in BOUNDS)
        else "DIFFERENT",
        "imbalance": max(row["train/imbalance_ratio"] for row in rows),
        "packed": min(row["train/packing_share"] for row in rows),
    }


def _markdown(report: dict[str, Any]) -> str:
    return page(
        "Layouts against one rank",
        report["machine"],
        f"A random Qwen2 of 4 layers in float32 trains {STEPS} steps of 2 updates from the same "
        "dumps in every layout (`train replay=…`). Differences are the largest over the steps, "
        "relative to max(1, |value|); those of the weights are absolute, after the last step "
        "(learning rate up to 1e-3). The bounds of every search are compared bit by bit. "
        "Imbalance is the operations of the rank with the most over the mean; packed is the share "
        "of positions that hold a real token, both of the worst step.",
        columns(report["rows"], COLUMNS),
        "Settings:",
        [f"- {row['layout']}: `{row['settings'] or '(none)'}`" for row in report["rows"]],
    )


def main() -> None:
    options = report_arguments(__doc__ or "").parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(Path(scratch))
    report = {"machine": machine(), "rows": rows}
    finish(options.out, _markdown(report), report)


if __name__ == "__main__":
    main()
