"""Tier B of the study: the demo's task, trained by this project itself; resumable.

    python -m examples.study.tier_b --out docs/study/tier_b

Every run is `bapo-megatron train` with `tier_b.yaml`: a Qwen2 of 115,000 parameters on
Megatron-core, sampled by the local engine at a fixed lag. BAPO's runs come first, because the yoked
ones take their bounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bapo_megatron.telemetry.sinks import read_metrics
from examples.study.shards import Shard, run_shards, write_manifest

_CLIPS = {"grpo": (0.8, 1.2), "start": (0.6, 1.2), "corner": (0.9, 3.0)}
_COLUMNS = {
    "reward": "reward/mean",
    "entropy": "policy/entropy",
    "gradient_norm": "policy/grad_norm",
    "positive_share": "loss/positive_share",
    "low": "clip/low",
    "high": "clip/high",
    "clipped_high": "clip/fraction_high",
    "clipped_low": "clip/fraction_low",
    "exit_start": "bapo/exit_start_share",
    "exit_met": "bapo/exit_met_share",
    "age": "rollout/staleness_mean",
}
"""Curves that a shard keeps, and the metric of each."""
_LISTS = ("arms", "lags", "rates", "seeds", "overrides")
_CONFIG = Path(__file__).with_name("tier_b.yaml")


@dataclass(frozen=True, slots=True)
class Setting:
    """One run."""

    arm: str
    lag: int
    learning_rate: float
    seed: int
    """Seed of the tiny model, of its data and of the run."""
    steps: int

    @property
    def name(self) -> str:
        """The name of its shard."""
        return f"{self.arm}_lag{self.lag}_lr{self.learning_rate:g}_seed{self.seed}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run."""

    arms: tuple[str, ...] = ("bapo", "grpo", "start", "corner", "yoked")
    lags: tuple[int, ...] = (0, 2, 8)
    rates: tuple[float, ...] = (1e-4, 1e-3)
    seeds: tuple[int, ...] = tuple(range(8))
    steps: int = 60
    overrides: tuple[str, ...] = ()
    """Further ``KEY=VALUE``, for every run."""

    def settings(self) -> list[Setting]:
        """Every run, those of the first learning rate and the first seeds first."""
        return [
            Setting(arm, lag, rate, seed, self.steps)
            for rate in self.rates
            for seed in self.seeds
            for lag in self.lags
            for arm in self.arms
        ]


def compute(setting: Setting, plan: Plan, out: Path) -> list[dict[str, Any]]:
    """Train, and keep the curves."""
    run_dir = out / "runs" / setting.name
    shutil.rmtree(run_dir, ignore_errors=True)  # of an interrupted study
    tiny = out / "tiny" / f"seed{setting.seed}"
    overrides = [
        f"run_dir={run_dir}",
        f"seed={setting.seed}",
        f"model.path={tiny / 'model'}",
        f"data.train.path={tiny / 'train.jsonl'}",
        f"eval.sets=[{{path: {tiny / 'heldout.jsonl'}, name: heldout}}]",
        f"optimizer.lr={setting.learning_rate}",
        f"train.steps={setting.steps}",
        *([f"rollout.fixed_lag={setting.lag}"] if setting.lag else []),
        *_objective(setting, plan, out),
        *plan.overrides,
    ]
    _call(out, "bapo_megatron", "train", str(_CONFIG), *overrides)
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if row["step"] > 0]
    curves = {name: [row.get(metric) for row in rows] for name, metric in _COLUMNS.items()}
    summary = json.loads((run_dir / "summary.json").read_text())
    shutil.rmtree(run_dir)
    return [asdict(setting) | {"accuracy_after": summary["accuracy_after"]} | curves]


def _objective(setting: Setting, plan: Plan, out: Path) -> list[str]:
    """The overrides of an arm."""
    if setting.arm in _CLIPS:
        low, high = _CLIPS[setting.arm]
        return [
            "algorithm.objective=clip",
            f"algorithm.fixed.low={low}",
            f"algorithm.fixed.high={high}",
        ]
    seed = setting.seed
    if setting.arm == "yoked":
        seed = plan.seeds[(plan.seeds.index(seed) + 1) % len(plan.seeds)]
    partner = Setting("bapo", setting.lag, setting.learning_rate, seed, setting.steps)
    file = f"algorithm.objective_options.file={out / 'bounds' / f'{partner.name}.json'}"
    if setting.arm == "bapo":
        return ["algorithm.objective=examples.study.yoked:RecordedBapo", file]
    assert setting.arm == "yoked"
    return [
        "algorithm.objective=examples.study.yoked:YokedToFile",
        file,
        f"algorithm.objective_options.seed={setting.seed}",
    ]


def make_tiny(out: Path, seed: int) -> list[dict[str, Any]]:
    """Make the model and the data of a seed."""
    _call(out, "examples.tiny", str(out / "tiny" / f"seed{seed}"), f"--seed={seed}")
    return [{"seed": seed}]


def _call(out: Path, *arguments: str) -> None:
    """Run a command of the project on one core; raise with the end of its output."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=_CONFIG.parents[2],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}\n{done.stdout[-2000:]}")


def run_plan(plan: Plan, out: Path, jobs: int) -> None:
    """Compute what is missing."""
    out = out.absolute()
    models = [Shard(f"seed{seed}", make_tiny, (out, seed)) for seed in plan.seeds]
    run_shards(models, out / "models", jobs)
    settings = plan.settings()
    for is_yoked in (False, True):
        shards = [
            Shard(setting.name, compute, (setting, plan, out))
            for setting in settings
            if (setting.arm == "yoked") == is_yoked
        ]
        run_shards(shards, out / "report", jobs)
    write_manifest(out, {"plan": asdict(plan)}, (out / "report").glob("*.parquet"))


def main() -> None:
    """Run what is missing of the plan."""
    parser, plan = argparse.ArgumentParser(description=__doc__.partition("\n")[0]), Plan()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--lags", type=int, nargs="+", default=plan.lags)
    parser.add_argument("--rates", type=float, nargs="+", default=plan.rates)
    parser.add_argument("--seeds", type=int, nargs="+", default=plan.seeds)
    parser.add_argument("--arms", nargs="+", default=plan.arms)
    parser.add_argument("--steps", type=int, default=plan.steps)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", default=plan.overrides)
    options = parser.parse_args()
    lists = {name: tuple(getattr(options, name)) for name in _LISTS}
    run_plan(Plan(**lists, steps=options.steps), options.out, options.jobs)


if __name__ == "__main__":
    main()
