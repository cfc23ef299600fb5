"""Runs of the demo's task that a benchmark makes, one by one or as a sweep, and their curves."""

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from bapo_megatron.telemetry.sinks import read_metrics
from bapo_megatron.tools.sweep.file import PlannedRun, load_sweep
from bapo_megatron.tools.sweep.run import run_sweep
from tests.benchmarks.harness import REPOSITORY
from tests.launch import run

CONFIG = REPOSITORY / "configs/demo.yaml"


def overrides(data_dir: Path, steps: int) -> list[str]:
    """What all runs on the data of examples.tiny have in common: one rank, and no checkpoint."""
    return [
        f"model.path={data_dir}/model",
        f"data.train.path={data_dir}/train.jsonl",
        f"eval.sets=[{{path: {data_dir}/heldout.jsonl, name: heldout}}]",
        f"train.steps={steps}",
        "parallel.tensor=1",
        "checkpoint.at_end=false",
    ]


def train(
    run_dir: Path, data_dir: Path, steps: int, settings: Sequence[str]
) -> list[dict[str, float]]:
    """Train once on the data of examples.tiny; returns the metrics."""
    arguments = [*overrides(data_dir, steps), "log.console=false", *settings]
    result = run(
        ["train", str(CONFIG), f"run_dir={run_dir}", *arguments], timeout_s=600 + 60 * steps
    )
    assert result.returncode == 0, result.stderr
    return read_metrics(run_dir / "metrics.jsonl")


def train_variants(
    data_dir: Path,
    directory: Path,
    variants: Mapping[str, Sequence[str]],
    *,
    common: Sequence[str],
    seeds: int,
    steps: int,
) -> dict[str, list[PlannedRun]]:
    """Train every variant, which is overrides, by every seed, one run at a time on one rank.

    Runs in the directory that are finished are not made again. Returns each variant's, by seed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "sweep.yaml"
    sweep = {
        "config": str(CONFIG),
        "dir": str(directory),
        "overrides": [*overrides(data_dir, steps), "eval.at_start=false", *common],
        "variants": {
            re.sub("[ ,]+", "-", name): list(changes) for name, changes in variants.items()
        },
        "seeds": list(range(seeds)),
    }
    file.write_text(json.dumps(sweep, indent=1))  # JSON is YAML
    loaded = load_sweep(file)
    failures = run_sweep(loaded)
    assert not failures, failures
    return dict(zip(variants, loaded.variants.values(), strict=True))


def draw(
    titles: Mapping[str, str], groups: Mapping[str, Sequence[dict[str, list[float]]]], out: Path
) -> None:
    """Draw a panel per metric, a colour per group: thin lines are runs, the thick one their mean.

    ``titles`` are by metric, and so are the curves of every run of a group.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    for axis, (metric, title) in zip(figure.subplots(2, 2).flat, titles.items(), strict=True):
        for number, (name, runs) in enumerate(groups.items()):
            curves = [run[metric] for run in runs]
            steps = range(1, len(curves[0]) + 1)
            for curve in curves:
                axis.plot(steps, curve, color=f"C{number}", linewidth=0.7, alpha=0.5)
            mean = [statistics.mean(values) for values in zip(*curves, strict=True)]
            axis.plot(steps, mean, color=f"C{number}", linewidth=2, label=name)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
