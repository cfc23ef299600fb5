"""Whether two runs are the same training, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path

from safetensors.torch import load_file

from bapo_megatron.telemetry.sinks import read_metrics

UNREPEATABLE = re.compile(
    "time/|ranks/|collector/|throughput/|weight_sync/.*_s$|eval/.*(wall_s|tokens_per_s)$"
    # Measured times decide whether predicted bounds are used; a new process begins without any.
    "|train/prediction_|train/forward_.*_flops"
)
"""Metrics that depend on the clock."""


def repeatable_rows(run_dir: Path) -> list[dict[str, float]]:
    """The metrics without what depends on the clock."""
    return [
        {name: value for name, value in row.items() if not UNREPEATABLE.match(name)}
        for row in read_metrics(run_dir / "metrics.jsonl")
    ]


def assert_same_training(run_dir: Path, expected: Path) -> None:
    """Compare the metrics and the exported weights of two runs."""
    assert repeatable_rows(run_dir) == repeatable_rows(expected)
    weights, reference = (load_file(d / "hf" / "model.safetensors") for d in (run_dir, expected))
    assert weights.keys() == reference.keys()
    for name, tensor in reference.items():
        assert weights[name].equal(tensor), name
