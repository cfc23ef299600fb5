"""Trains from the same dumps in every layout, and writes how far each is from one rank."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.benchmarks.harness import REPOSITORY, heading, machine, write_report
from tests.distributed_launch import run_ranks
from tests.trainer.dumps import make_random_model, replay_settings, write_dump_shapes
from tests.trainer.layout_ranks import CASES, Case, Outcome, train_in, with_references

STEPS = 10
COMPARED = {"loss": "loss/policy", "gradient norm": "policy/grad_norm"}
BOUNDS = ("clip/low", "clip/high")


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
        "bounds equal": all(row[name] == ref[name] for row, ref in pairs for name in BOUNDS),
        "different bounds": len({row[name] for row in rows for name in BOUNDS}),
        "imbalance": max(row["train/imbalance_ratio"] for row in rows),
        "packed": min(row["train/packing_share"] for row in rows),
    }


def _markdown(report: dict[str, Any]) -> str:
    where = report["machine"]
    lines = [
        "# Layouts against one rank",
        "",
        *heading(where),
        f"A random Qwen2 of 4 layers in float32 trains {STEPS} steps of 2 updates from the same "
        "dumps in every layout (`train replay=…`). Differences are the largest over the steps, "
        "relative to max(1, |value|); those of the weights are absolute, after the last step "
        "(learning rate up to 1e-3). The bounds of every search are compared bit by bit. "
        "Imbalance is the operations of the rank with the most over the mean; packed is the share "
        "of positions that hold a real token, both of the worst step.",
        "",
        "| layout | ranks | loss | gradient norm | weights | bounds | imbalance | packed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        bounds = "equal" if row["bounds equal"] else "DIFFERENT"
        lines.append(
            f"| {row['layout']} | {row['ranks']} | {row['loss']:.1e} | "
            f"{row['gradient norm']:.1e} | {row['weights']:.1e} | {bounds} | "
            f"{row['imbalance']:.2f} | "
            f"{row['packed']:.0%} |"
        )
    lines += ["", "Settings:", ""]
    lines += [f"- {row['layout']}: `{row['settings'] or '(none)'}`" for row in report["rows"]]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=REPOSITORY / "docs/benchmarks/layouts_cpu_202611"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(Path(scratch))
    report = {"machine": machine(torch.device("cpu")), "rows": rows}
    text = _markdown(report)
    print(text)  # noqa: T201
    write_report(options.out, text, report)


if __name__ == "__main__":
    main()
