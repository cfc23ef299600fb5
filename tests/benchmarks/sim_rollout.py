"""What partial and asynchronous rollout gain on a cluster, and what staleness they cost.

python -m tests.benchmarks.sim_rollout --figure docs/benchmarks/rollout_simulation_202611.png

A simulation of discrete events: no GPU, no model. It prints the table of the page beside the
figure, which says what ``sim_cluster`` assumes and what follows.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bapo_megatron.config.rollout import RolloutConfig
from tests.benchmarks.harness import columns
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


Outcome = dict[str, float]
"""What one simulation amounts to; ages in steps, times and tokens of the window."""


def modes() -> list[Mode]:
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
    return {
        "steps_per_h": len(window) / wall_s * 3600,
        "busy_share": busy_s / engine_s,
        "prefill_share": (end.prefill_s - begin.prefill_s) / busy_s,
        "engine_tokens_per_s": tokens / engine_s,
        "trainer_idle_share": 1 - sum(batch.training_s for batch in window) / wall_s,
        "age_mean": float((ages * weights).sum() / weights.sum()),
        "age_p90": float(ages[order][np.searchsorted(cumulative, 0.9 * cumulative[-1])]),
        "age_max": int(ages.max()),
        "stale_share": float(weights[ages > 0].sum() / weights.sum()),
        "masked_share": sum(batch.masked_tokens for batch in window) / float(weights.sum()),
        "wasted_share": (end.wasted_tokens - begin.wasted_tokens) / tokens,
        "carried_share": sum(count > 0 for count in carries) / len(carries),
        "first_length_ratio": _mean_length(record, slice(0, FIRST)) / population_mean,
        "length_ratio": _mean_length(record, slice(WARM_UP, None)) / population_mean,
    }


def _mean_length(record: Record, part: slice) -> float:
    return statistics.fmean(x for batch in record.batches[part] for x in batch.lengths)


def mean_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """Mean over seeds; the largest of maxima."""
    means = {n: statistics.fmean(outcome[n] for outcome in outcomes) for n in outcomes[0]}
    return means | {"age_max": max(outcome["age_max"] for outcome in outcomes)}


COLUMNS = {
    "": "{name}",
    "steps/h": "{steps_per_h:.1f}",
    "× synchronous": "{speedup:.2f}",
    "engines busy": "{busy_share:.0%}",
    "of it prefill": "{prefill_share:.0%}",
    "tokens/s of an engine": "{engine_tokens_per_s:,.0f}",
    "trainer idle": "{trainer_idle_share:.0%}",
    "age: mean": "{age_mean:.2f}",
    "p90": "{age_p90:.3g}",
    "max": "{age_max}",
    "stale tokens": "{stale_share:.0%}",
    "wasted": "{wasted_share:.0%}",
    "masked": "{masked_share:.0%}",
    "carried groups": "{carried_share:.0%}",
    f"length: first {FIRST}": "{first_length_ratio:.2f}",
    "later": "{length_ratio:.2f}",
}
"""Busy engines decode or prefill; a carried group missed a batch after its first token."""

TIMES = ("synchronous", "partial, oversample 1", "async 4")
"""Modes whose running sequences are drawn over time."""
LENGTHS = (
    "synchronous",
    "oversample ½, discard",
    "partial, oversample 1",
    "async 4",
    "async 2, oldest ≤ 2: drop",
)
"""Modes whose batches' mean lengths are drawn."""
WINDOW_S = 3600.0


Result = tuple[Outcome, Record]
"""One mode: the mean over the seeds, and the record of the first one."""


def page_table(outcomes: dict[str, Outcome]) -> str:
    """All modes as markdown; the first one is the baseline."""
    base = next(iter(outcomes.values()))["steps_per_h"]
    rows = (
        {"name": name, "speedup": outcome["steps_per_h"] / base, **outcome}
        for name, outcome in outcomes.items()
    )
    return "\n".join(columns(rows, COLUMNS))


def draw(
    results: dict[str, Result], hardware: Hardware, population_mean: float, path: Path
) -> None:
    """Draw speed, ages, running sequences over time, and the lengths of the first batches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 10), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.25, 1))
    _draw_rates(figure.add_subplot(grid[0, 0]), results)
    _draw_ages(figure.add_subplot(grid[0, 1]), results)
    _draw_running(figure.add_subplot(grid[1, 0]), results, hardware)
    _draw_lengths(figure.add_subplot(grid[1, 1]), results, population_mean)
    figure.savefig(path, dpi=110)


def _draw_rates(axes: Any, results: dict[str, Result]) -> None:
    rates = [outcome["steps_per_h"] for outcome, _ in results.values()]
    bars = axes.barh(list(results), rates, color="tab:blue", height=0.65)
    axes.bar_label(bars, labels=[f"{rate / rates[0]:.1f}×" for rate in rates], padding=3)
    axes.set(title="Speed", xlabel="steps per hour", xlim=(0, 1.12 * max(rates)))
    axes.invert_yaxis()


def _draw_ages(axes: Any, results: dict[str, Result]) -> None:
    outcomes = [outcome for outcome, _ in results.values()]
    rows = range(len(outcomes))
    axes.hlines(rows, 0, [outcome["age_max"] for outcome in outcomes], color="0.8")
    for label, marker, field in (
        ("mean", "o", "age_mean"),
        ("90th percentile", "s", "age_p90"),
        ("maximum", "|", "age_max"),
    ):
        axes.plot([outcome[field] for outcome in outcomes], rows, marker, label=label, markersize=7)
    axes.set(title="Age of the trained tokens", xlabel="steps", yticks=rows)
    axes.set_yticklabels([])
    axes.grid(axis="x", color="0.9")
    axes.set_ylim(len(outcomes) - 0.5, -0.5)
    axes.legend(loc="lower right")


def _draw_running(axes: Any, results: dict[str, Result], hardware: Hardware) -> None:
    for name in TIMES:
        _, record = results[name]
        begin_s = record.batches[WARM_UP].formed_s
        times_s, counts = np.array(record.running).T
        edges_s = np.linspace(begin_s, min(begin_s + WINDOW_S, times_s[-1]), 361)
        # The mean over each bin of what is constant between two events.
        covered = np.interp(
            edges_s, times_s, np.concatenate([[0], (np.diff(times_s) * counts[:-1]).cumsum()])
        )
        means = np.diff(covered) / np.diff(edges_s) / hardware.engines
        axes.plot((edges_s[:-1] - begin_s) / 60, means, label=name)
    axes.set(
        title="Sequences that an engine decodes",
        xlabel="minutes from the forming of a batch",
        ylabel=f"mean over engines (at most {hardware.max_running})",
        ylim=(0, 1.25 * hardware.max_running),
    )
    axes.legend(fontsize="small", loc="upper right", ncols=len(TIMES))


def _draw_lengths(axes: Any, results: dict[str, Result], population_mean: float) -> None:
    for name, marker in zip(LENGTHS, itertools.cycle("osv^D"), strict=False):
        batches = results[name][1].batches[:WARM_UP]
        ratios = [np.mean(batch.lengths) / population_mean for batch in batches]
        axes.plot(range(1, len(ratios) + 1), ratios, marker=marker, markersize=4, label=name)
    axes.axhline(1, color="0.7", linewidth=1)
    axes.set(
        title="Mean response of a batch over that of the distribution",
        xlabel="step",
        ylabel="ratio",
    )
    axes.legend(fontsize="small")


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulates generation and training on a cluster.")
    parser.add_argument("--steps", type=int, default=40, help="steps after the warm-up")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--engines", type=int, default=Hardware().engines)
    parser.add_argument("--figure", type=Path, help="draw it here")
    options = parser.parse_args()
    if options.steps < 2:  # nothing is generated between the only batch and its sync
        parser.error("--steps: must be at least 2")
    hardware = Hardware(engines=options.engines)
    with ProcessPoolExecutor() as pool:
        jobs = {
            mode.name: [
                pool.submit(simulate, mode, options.steps, seed, hardware)
                for seed in range(options.seeds)
            ]
            for mode in modes()
        }
        results, spreads = {}, []
        for name, futures in jobs.items():
            outcomes, records = zip(*(future.result() for future in futures), strict=True)
            rates = [outcome["steps_per_h"] for outcome in outcomes]
            spreads.append((max(rates) - min(rates)) / statistics.fmean(rates))
            results[name] = mean_outcome(outcomes), records[0]
    text = page_table({name: outcome for name, (outcome, _) in results.items()})
    sys.stdout.write(f"{text}\n\nThe seeds' rates differ by at most {max(spreads):.1%}.\n")
    if options.figure is not None:
        draw(results, hardware, mean_length(Lengths()), options.figure)


if __name__ == "__main__":
    main()
