"""The table and the figure of ``sim_rollout``."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tests.benchmarks.sim_rollout import FIRST, WARM_UP, Outcome

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from tests.benchmarks.sim_cluster import Hardware
    from tests.benchmarks.sim_schedule import Record

COLUMNS = (
    ("steps/h", lambda o, base: f"{o.steps_per_h:.1f}"),
    ("× synchronous", lambda o, base: f"{o.steps_per_h / base.steps_per_h:.2f}"),
    ("engines busy", lambda o, base: f"{o.busy_share:.0%}"),
    ("of it prefill", lambda o, base: f"{o.prefill_share:.0%}"),
    ("tokens/s of an engine", lambda o, base: f"{o.engine_tokens_per_s:,.0f}"),
    ("trainer idle", lambda o, base: f"{o.trainer_idle_share:.0%}"),
    ("age: mean", lambda o, base: f"{o.age_mean:.2f}"),
    ("p90", lambda o, base: f"{o.age_p90:.1f}".removesuffix(".0")),
    ("max", lambda o, base: f"{o.age_max}"),
    ("stale tokens", lambda o, base: f"{o.stale_share:.0%}"),
    ("wasted", lambda o, base: f"{o.wasted_share:.0%}"),
    ("masked", lambda o, base: f"{o.masked_share:.0%}"),
    ("carried groups", lambda o, base: f"{o.carried_share:.0%}"),
    (f"length: first {FIRST}", lambda o, base: f"{o.first_length_ratio:.2f}"),
    ("later", lambda o, base: f"{o.length_ratio:.2f}"),
)
"""Heading and cell of each column; the baseline is the first outcome."""

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


@dataclass(frozen=True, slots=True)
class Result:
    """One mode."""

    outcome: Outcome
    """Mean over the seeds."""
    record: Record
    """Record of the first seed."""
    spread: float
    """Largest minus smallest rate of the seeds, over their mean."""


def table(outcomes: dict[str, Outcome]) -> str:
    """All modes as markdown."""
    base = next(iter(outcomes.values()))
    lines = ["| " + " | ".join(["", *(heading for heading, _ in COLUMNS)]) + " |"]
    lines.append("|---" * (len(COLUMNS) + 1) + "|")
    for name, outcome in outcomes.items():
        cells = [name, *(cell(outcome, base) for _, cell in COLUMNS)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


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
    rates = [result.outcome.steps_per_h for result in results.values()]
    bars = axes.barh(list(results), rates, color="tab:blue", height=0.65)
    axes.bar_label(bars, labels=[f"{rate / rates[0]:.1f}×" for rate in rates], padding=3)
    axes.set(title="Speed", xlabel="steps per hour", xlim=(0, 1.12 * max(rates)))
    axes.invert_yaxis()


def _draw_ages(axes: Any, results: dict[str, Result]) -> None:
    found = [result.outcome for result in results.values()]
    rows = range(len(found))
    axes.hlines(rows, 0, [outcome.age_max for outcome in found], color="0.8")
    for label, marker, values in (
        ("mean", "o", [outcome.age_mean for outcome in found]),
        ("90th percentile", "s", [outcome.age_p90 for outcome in found]),
        ("maximum", "|", [outcome.age_max for outcome in found]),
    ):
        axes.plot(values, rows, marker, label=label, markersize=7)
    axes.set(title="Age of the trained tokens", xlabel="steps", yticks=rows)
    axes.set_yticklabels([])
    axes.grid(axis="x", color="0.9")
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.legend(loc="lower right")


def _draw_running(axes: Any, results: dict[str, Result], hardware: Hardware) -> None:
    for name in TIMES:
        record = results[name].record
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
        batches = results[name].record.batches[:WARM_UP]
        ratios = [np.mean(batch.lengths) / population_mean for batch in batches]
        axes.plot(range(1, len(ratios) + 1), ratios, marker=marker, markersize=4, label=name)
    axes.axhline(1, color="0.7", linewidth=1)
    axes.set(
        title="Mean response of a batch over that of the distribution",
        xlabel="step",
        ylabel="ratio",
    )
    axes.legend(fontsize="small")
