"""What partial and asynchronous rollout gain on a cluster, and what staleness they cost.

python -m tests.benchmarks.sim_rollout --figure docs/benchmarks/rollout_simulation_202611.png

A simulation of discrete events: no GPU, no model. It prints the table of the page beside the
figure, which says what ``sim_cluster`` assumes and what follows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bapo_megatron.config.rollout import RolloutConfig
from tests.benchmarks.sim_cluster import Hardware, Lengths
from tests.benchmarks.sim_schedule import Mode, Record, Simulation

if TYPE_CHECKING:
    from collections.abc import Sequence

GROUPS, SAMPLES, UPDATES = 256, 16, 2
MAX_AGE_STEPS = 2
"""Limit of ages in the modes that have one."""
WARM_UP = 30
"""Steps before the window that rates and ages are taken from."""
FIRST = 3
"""Batches whose lengths show the bias of the start."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one simulation amounts to; ages in steps, times and tokens of the window."""

    steps_per_h: float
    busy_share: float
    """Share of the engines' time: decoding or prefill."""
    prefill_share: float
    """Share of the busy time: contexts are read, nearly all of them again."""
    engine_tokens_per_s: float
    """Rate of one engine, over the whole window."""
    trainer_idle_share: float
    age_mean: float
    age_p90: float
    age_max: int
    stale_share: float
    """Share of the trained tokens: older than the newest weights."""
    masked_share: float
    """Share of the trained tokens: too old, without a gradient."""
    wasted_share: float
    """Share of the generated tokens: those of groups that were given up."""
    carried_share: float
    """Share of the batches' groups: missed at least one batch after their first token."""
    first_length_ratio: float
    """Mean response of the first batches over that of the distribution."""
    length_ratio: float
    """The same in the window."""
    kv_share: float
    """Share of an engine's memory for keys and values: the fullest moment of the fullest engine."""


def modes() -> list[Mode]:
    """What is compared."""

    def rollout(**settings: Any) -> RolloutConfig:
        sizes = {
            "groups_per_step": GROUPS,
            "samples_per_group": SAMPLES,
            "max_response_tokens": Lengths().longest,
        }
        return RolloutConfig.model_validate(sizes | settings)

    def limited(**staleness: Any) -> RolloutConfig:
        limit = {"max_age": MAX_AGE_STEPS * UPDATES, **staleness}
        return rollout(async_steps=2, staleness=limit)

    half = GROUPS // 2
    in_place = {"in_flight": "in_place"}
    return [
        Mode("synchronous", rollout()),
        Mode("synchronous, groups spread", rollout(), keeps_groups_together=False),
        Mode("oversample ½, discard", rollout(oversample_groups=half, partial=False)),
        Mode("partial, oversample ½", rollout(oversample_groups=half)),
        Mode("partial, oversample 1", rollout(oversample_groups=GROUPS)),
        Mode("async 1", rollout(async_steps=1)),
        Mode("async 1, oversample 1", rollout(async_steps=1, oversample_groups=GROUPS)),
        Mode("async 1, in place", rollout(async_steps=1, weight_sync=in_place)),
        Mode("async 2", rollout(async_steps=2)),
        Mode("async 2, groups spread", rollout(async_steps=2), keeps_groups_together=False),
        Mode("async 4", rollout(async_steps=4)),
        Mode("async 4, in place", rollout(async_steps=4, weight_sync=in_place)),
        *(
            Mode(f"async {steps}, drained", rollout(async_steps=steps), drains=True)
            for steps in (1, 2, 4)
        ),
        Mode(f"async 2, oldest ≤ {MAX_AGE_STEPS}: drop", limited(measure="oldest")),
        Mode(f"async 2, mean ≤ {MAX_AGE_STEPS}: drop", limited(measure="mean")),
        Mode(f"async 2, token ≤ {MAX_AGE_STEPS}: mask", limited(measure="token", action="mask")),
    ]


def simulate(mode: Mode, steps: int, seed: int, hardware: Hardware) -> tuple[Outcome, Record]:
    """Run one mode for ``WARM_UP + steps`` steps."""
    lengths = Lengths()
    record = Simulation(mode, hardware, lengths, seed).run(WARM_UP + steps)
    return summarise(record, hardware, mean_length(lengths)), record


def mean_length(lengths: Lengths) -> float:
    """Mean response of the distribution."""
    rng = np.random.default_rng(0)
    return statistics.fmean(x for _ in range(20_000) for x in lengths.draw(rng, SAMPLES))


def summarise(record: Record, hardware: Hardware, population_mean: float) -> Outcome:
    """Form the quotients over the window."""
    begin, end = record.snapshots[WARM_UP], record.snapshots[-1]
    window = record.batches[WARM_UP:]
    wall_s = end.now_s - begin.now_s
    engine_s = wall_s * hardware.engines
    tokens = end.tokens - begin.tokens
    ages = np.array([age for batch in window for age in batch.tokens_by_age])
    weights = np.array([count for batch in window for count in batch.tokens_by_age.values()])
    order = np.argsort(ages)
    cumulative = weights[order].cumsum()
    carries = [carries for batch in window for carries in batch.carries]
    busy_s = (end.decode_s - begin.decode_s) + (end.prefill_s - begin.prefill_s)
    return Outcome(
        steps_per_h=len(window) / wall_s * 3600,
        busy_share=busy_s / engine_s,
        prefill_share=(end.prefill_s - begin.prefill_s) / busy_s,
        engine_tokens_per_s=tokens / engine_s,
        trainer_idle_share=1 - sum(batch.training_s for batch in window) / wall_s,
        age_mean=float((ages * weights).sum() / weights.sum()),
        age_p90=float(ages[order][np.searchsorted(cumulative, 0.9 * cumulative[-1])]),
        age_max=int(ages.max()),
        stale_share=float(weights[ages > 0].sum() / weights.sum()),
        masked_share=sum(batch.masked_tokens for batch in window) / float(weights.sum()),
        wasted_share=(end.wasted_tokens - begin.wasted_tokens) / tokens,
        carried_share=sum(count > 0 for count in carries) / len(carries),
        first_length_ratio=_mean_length(record, slice(0, FIRST)) / population_mean,
        length_ratio=_mean_length(record, slice(WARM_UP, None)) / population_mean,
        kv_share=record.peak_context / hardware.kv_tokens,
    )


def _mean_length(record: Record, part: slice) -> float:
    return statistics.fmean(x for batch in record.batches[part] for x in batch.lengths)


def mean_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """Mean over seeds; the largest of maxima."""
    names = Outcome.__slots__
    values = {n: statistics.fmean(getattr(outcome, n) for outcome in outcomes) for n in names}
    values["age_max"] = max(outcome.age_max for outcome in outcomes)
    values["kv_share"] = max(outcome.kv_share for outcome in outcomes)
    return Outcome(**values)


def main() -> None:
    """Simulate every mode with every seed, on all cores."""
    from tests.benchmarks.sim_report import Result, draw, table

    parser = argparse.ArgumentParser(description="Simulates generation and training on a cluster.")
    parser.add_argument("--steps", type=int, default=40, help="steps after the warm-up")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--engines", type=int, default=Hardware().engines)
    parser.add_argument("--figure", type=Path, help="draw it here")
    options = parser.parse_args()
    hardware = Hardware(engines=options.engines)
    with ProcessPoolExecutor() as pool:
        jobs = {
            mode.name: [
                pool.submit(simulate, mode, options.steps, seed, hardware)
                for seed in range(options.seeds)
            ]
            for mode in modes()
        }
        results = {}
        for name, futures in jobs.items():
            outcomes, records = zip(*(future.result() for future in futures), strict=True)
            rates = [outcome.steps_per_h for outcome in outcomes]
            spread = (max(rates) - min(rates)) / statistics.fmean(rates)
            results[name] = Result(mean_outcome(outcomes), records[0], spread)
    spread = max(result.spread for result in results.values())
    outcomes = {name: result.outcome for name, result in results.items()}
    sys.stdout.write(f"{table(outcomes)}\n\nThe seeds' rates differ by at most {spread:.1%}.\n")
    if options.figure is not None:
        draw(results, hardware, mean_length(Lengths()), options.figure)


if __name__ == "__main__":
    main()
