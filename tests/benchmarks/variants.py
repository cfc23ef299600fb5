"""Trains the demo in several variants by several seeds: a sweep that a benchmark writes."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from bapo_megatron.tools.sweep.file import PlannedRun, load_sweep
from bapo_megatron.tools.sweep.run import run_sweep
from tests.benchmarks.harness import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

CONFIG = REPOSITORY / "configs/demo.yaml"


def train_variants(
    data_dir: Path,
    directory: Path,
    variants: Mapping[str, Sequence[str]],
    *,
    common: Sequence[str],
    seeds: int,
    steps: int,
) -> dict[str, list[PlannedRun]]:
    """Train every variant by every seed, one run at a time on one rank.

    Args:
        data_dir: What make-tiny wrote.
        directory: Of the runs; those that are finished are not made again.
        variants: By name the overrides of each.
        common: Overrides of all.
        seeds: From 0 on.
        steps: Of each run.

    Returns:
        The finished runs of each variant, by seed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "sweep.yaml"
    overrides = [
        f"model.path={data_dir}/model",
        f"data.train.path={data_dir}/train.jsonl",
        f"eval.sets=[{{path: {data_dir}/heldout.jsonl, name: heldout}}]",
        f"train.steps={steps}",
        *("parallel.tensor=1", "eval.at_start=false", "checkpoint.at_end=false"),
        *common,
    ]
    sweep = {
        "config": str(CONFIG),
        "dir": str(directory),
        "overrides": overrides,
        "variants": {_directory_name(name): list(given) for name, given in variants.items()},
        "seeds": list(range(seeds)),
    }
    file.write_text(json.dumps(sweep, indent=1))  # JSON is YAML
    loaded = load_sweep(file)
    failures = run_sweep(loaded)
    assert not failures, failures
    return dict(zip(variants, loaded.variants.values(), strict=True))


def _directory_name(variant: str) -> str:
    return re.sub("[ ,]+", "-", variant)
