"""Whether asynchronous steps hide the shorter one of rollout and training, and how far that scales.

    python -m tests.benchmarks.sim_async

A simulation of discrete events: no GPU, no model. It prints the tables of
docs/benchmarks/async_simulation_202611.md, which says what is assumed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bapo_megatron.config.load import load_config
from tests.benchmarks.harness import columns
from tests.benchmarks.sim_cluster import Hardware, Lengths
from tests.benchmarks.sim_schedule import Mode, Record, Simulation

CONFIGS = Path(__file__).parents[2] / "configs"
LONG = Lengths(median=26_000, sigma=0.9)
"""Mean 31,400, 15 % cut off at 65,536."""
PEAK_FLOPS, BANDWIDTH, MEMORY = 989e12, 3.35e12, 80e9


@dataclass(frozen=True, slots=True)
class Model:
    """What a model does to hardware."""

    parameters: float
    layers: int
    attention_width: int
    kv_bytes_per_token: int
    server_gpus: int
    overhead_s: float

    def hardware(self, trainer_gpus: int, rollout_gpus: int) -> Hardware:
        """Servers as one GPU each, with that multiple of everything."""
        size = self.server_gpus
        return Hardware(
            engines=rollout_gpus // size,
            max_running=256,
            trainer_gpus=trainer_gpus // size,
            parameters=self.parameters,
            layers=self.layers,
            attention_width=self.attention_width,
            kv_bytes_per_token=self.kv_bytes_per_token,
            peak_flops=size * PEAK_FLOPS,
            memory_bytes_per_s=size * BANDWIDTH,
            memory_bytes=0.88 * size * MEMORY,
            overhead_s=self.overhead_s,
        )


SEVEN = Model(7.62e9, 28, 3584, 57_344, 1, 1e-3)
THIRTY_TWO = Model(32.8e9, 64, 5120, 262_144, 4, 4e-3)


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration on a cluster."""

    config: str
    model: Model
    trainer_gpus: int
    rollout_gpus: int

    def mode(self) -> Mode:
        config = load_config(CONFIGS / f"{self.config}.yaml")
        return Mode(self.config, config.rollout, config.algorithm.updates_per_batch)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds of a step, and ages in updates when trained."""

    step_s: float
    rollout_s: float
    """A step with a trainer and weight syncs that take no time; of a synchronous one, the rest."""
    training_s: float
    age_mean: float
    age_p99: float
    age_max: float
    over_7_share: float
    """Tokens older than 7 updates, beyond what the paper trains on (its 8×)."""
    length_ratio: float
    """Mean response over that of the distribution."""
    concurrent: float
    """Requests per engine."""

    @property
    def ratio(self) -> float:
        """Step over the longer one of rollout and training; 1 hides the other one whole."""
        return self.step_s / max(self.rollout_s, self.training_s)


def simulate(case: Case, steps: int, warm_up: int, seed: int) -> Outcome:
    """Run a case and form means over the steps after the warm-up."""
    hardware, mode = case.model.hardware(case.trainer_gpus, case.rollout_gpus), case.mode()
    record = Simulation(mode, hardware, LONG, seed).run(warm_up + steps)
    window = record.batches[warm_up:]
    step_s = _step_s(record, warm_up)
    training_s = statistics.fmean(batch.training_s for batch in window)
    rollout_s = step_s - training_s - hardware.sync_s
    if mode.rollout.async_steps:
        idle = replace(hardware, trainer_gpus=10**12, sync_s=0.0)
        rollout_s = _step_s(Simulation(mode, idle, LONG, seed).run(warm_up + steps), warm_up)
    tokens_by_age: Counter[int] = Counter()
    for batch in window:
        for steps_old, tokens in batch.tokens_by_age.items():
            for update in range(mode.updates_per_batch):  # each trains an equal part
                tokens_by_age[steps_old * mode.updates_per_batch + update] += tokens
    ages = np.array(sorted(tokens_by_age))
    weights = np.array([tokens_by_age[age] for age in ages]) / tokens_by_age.total()
    rng = np.random.default_rng(0)
    population = statistics.fmean(x for _ in range(4000) for x in LONG.draw(rng, 16))
    begin_s = record.snapshots[warm_up].now_s
    running = [count for now_s, count in record.running if now_s > begin_s]
    return Outcome(
        step_s=step_s,
        rollout_s=rollout_s,
        training_s=training_s,
        age_mean=float(ages @ weights),
        age_p99=float(ages[np.searchsorted(weights.cumsum(), 0.99)]),
        age_max=float(ages[-1]),
        over_7_share=float(weights[ages > 7].sum()),
        length_ratio=statistics.fmean(x for b in window for x in b.lengths) / population,
        concurrent=statistics.fmean(running) / hardware.engines,
    )


def _step_s(record: Record, warm_up: int) -> float:
    begin, end = record.snapshots[warm_up], record.snapshots[-1]
    return (end.now_s - begin.now_s) / len(record.batches[warm_up:])


CASES = [
    Case("bp-math-7b-64k", SEVEN, 32, 32),
    Case("bp-math-7b-64k-async", SEVEN, 32, 32),
    Case("bp-math-7b-64k-async", SEVEN, 24, 40),
    Case("bp-math-32b-64k", THIRTY_TWO, 128, 128),
    Case("bp-math-32b-64k-async", THIRTY_TWO, 128, 128),
    Case("bp-math-32b-64k-async", THIRTY_TWO, 64, 192),
]
LARGER = [
    Case(f"bp-math-32b-64k{kind}", THIRTY_TWO, gpus, gpus)
    for kind in ("", "-async")
    for gpus in (512, 1024)
]
COLUMNS = {
    "configuration": "{case.config}",
    "trainer + rollout": "{case.trainer_gpus} + {case.rollout_gpus}",
    "step, s": "{mean.step_s:,.0f}",
    "rollout, s": "{mean.rollout_s:,.0f}",
    "training, s": "{mean.training_s:,.0f}",
    "step / longer one": "{mean.ratio:.3f}",
    "age: mean": "{mean.age_mean:.1f}",
    "99 %": "{mean.age_p99:.0f}",
    "max": "{mean.age_max:.0f}",
    "over 7": "{mean.over_7_share:.1%}",
    "length": "{mean.length_ratio:.2f}",
    "requests per server": "{mean.concurrent:.0f}",
}


def mean_of(outcomes: list[Outcome]) -> Outcome:
    """The mean of every field over seeds."""
    names = Outcome.__slots__
    return replace(
        outcomes[0], **{n: statistics.fmean(getattr(o, n) for o in outcomes) for n in names}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulates asynchronous steps.")
    parser.add_argument("--steps", type=int, default=20, help="steps after the warm-up")
    parser.add_argument("--warm-up", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    with ProcessPoolExecutor() as pool:
        for cases in (CASES, LARGER):
            jobs = [
                [
                    pool.submit(simulate, case, options.steps, options.warm_up, seed)
                    for seed in range(options.seeds)
                ]
                for case in cases
            ]
            rows = []
            for case, futures in zip(cases, jobs, strict=True):
                mean = mean_of([future.result() for future in futures])
                rows.append({"case": case, "mean": mean})
            sys.stdout.write("\n".join(columns(rows, COLUMNS)) + "\n\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
