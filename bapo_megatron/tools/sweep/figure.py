"""A sweep as one figure: curves of all runs, scores by seed, differences from the first variant."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.runtime.files import atomic_write_bytes
from bapo_megatron.tools.report.figures import MAX_POINTS, curve_of, distinct_colors
from bapo_megatron.tools.report.runs import Run, read_runs
from bapo_megatron.tools.sweep.file import Sweep
from bapo_megatron.tools.sweep.results import SweepResults, VariantScore

_CURVES = {"Mean reward of the batch": "reward/mean", "Entropy (nats per token)": "policy/entropy"}
"""Metric of each panel, by its title."""


def draw_sweep(sweep: Sweep, results: SweepResults, out: Path) -> None:
    """Draw what the finished runs have, and replace ``out``.

    Above, a thin line is a run and a thick one the mean of a variant's runs. Below, for the first
    score of each set, a grey line joins the runs of one seed, and bars are 95 % intervals.
    """
    from matplotlib.figure import Figure  # takes a second

    colors = dict(zip(sweep.variants, distinct_colors(len(sweep.variants)), strict=True))
    first_rows: dict[str, list[VariantScore]] = {}
    for row in results.rows:
        rows = first_rows.setdefault(row.score.set_name, [])
        if row.variant not in {each.variant for each in rows}:
            rows.append(row)
    height = 1 + len(first_rows)
    variants: dict[str, list[Run]] = {name: [] for name in colors}
    finished = [run for run in sweep.runs if run.is_finished]
    found = read_runs([run.run_dir for run in finished])
    for planned, run in zip(finished, found, strict=True):
        variants[planned.variant].append(run)
    figure = Figure(figsize=(12, 4 * height), layout="constrained")
    axes = figure.subplots(height, 2, squeeze=False)
    for axis, (title, metric) in zip(axes[0], _CURVES.items(), strict=True):
        _draw_curves(axis, variants, metric, colors)
        axis.set(title=title, xlabel="step")
    for (left, right), rows in zip(axes[1:], first_rows.values(), strict=True):
        _draw_scores(left, rows, colors)
        _draw_differences(right, rows, colors, next(iter(sweep.variants)))
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 4) or 1)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    atomic_write_bytes(out, buffer.getvalue())


def _draw_curves(
    axis: Any, variants: Mapping[str, Sequence[Run]], metric: str, colors: Mapping[str, Any]
) -> None:
    for name, runs in variants.items():
        for run in runs:
            axis.plot(*_curve([run], metric), color=colors[name], linewidth=0.7, alpha=0.5)
        axis.plot(*_curve(runs, metric), color=colors[name], linewidth=2.2, label=name)
    axis.grid(alpha=0.3)


def _curve(runs: Sequence[Run], metric: str) -> tuple[list[float], list[float]]:
    curve = curve_of(runs, metric, MAX_POINTS) if runs else {}
    return curve.get("x", []), curve.get("y", [])


def _draw_scores(axis: Any, rows: list[VariantScore], colors: Mapping[str, Any]) -> None:
    """Every run as a dot beside the mean and its interval."""
    seeds = sorted({seed for row in rows for seed in row.score.by_seed})
    for seed in seeds:
        found = [(place, row.score.by_seed.get(seed)) for place, row in enumerate(rows)]
        points = [(place, value) for place, value in found if value is not None]
        axis.plot(*zip(*points, strict=True), color="grey", linewidth=0.7, alpha=0.6)
    for place, row in enumerate(rows):
        score, color = row.score, colors[row.variant]
        axis.plot([place] * len(score.by_seed), list(score.by_seed.values()), ".", color=color)
        _draw_interval(axis, place + 0.12, score.mean, score.low, score.high, color)
    axis.set_xticks(range(len(rows)), [row.variant for row in rows], rotation=_slant(rows))
    axis.set_title(f"{_name_of(rows)} by seed, and means")
    axis.grid(alpha=0.3, axis="y")


def _draw_differences(
    axis: Any, rows: list[VariantScore], colors: Mapping[str, Any], first: str
) -> None:
    shown = [row for row in rows if row.against_first is not None]
    axis.axhline(0, color="grey", linewidth=0.8)
    for place, row in enumerate(shown):
        assert row.against_first is not None, "left out above"
        paired = row.against_first.paired
        color = colors[row.variant]
        _draw_interval(axis, place, paired.difference, paired.low, paired.high, color)
    axis.set_xticks(range(len(shown)), [row.variant for row in shown], rotation=_slant(shown))
    axis.set_xlim(-0.5, max(len(shown), 1) - 0.5)
    axis.set_title(f"{_name_of(rows)} minus that of {first}")
    axis.grid(alpha=0.3, axis="y")


def _draw_interval(
    axis: Any, place: float, mean: float, low: float | None, high: float | None, color: Any
) -> None:
    error = None if low is None or high is None else [[mean - low], [high - mean]]
    axis.errorbar([place], [mean], yerr=error, fmt="D", color=color, markersize=5, capsize=4)


def _name_of(rows: list[VariantScore]) -> str:
    names = dict.fromkeys(row.score.name for row in rows)  # avg@n has its n from each variant
    return f"{rows[0].score.set_name}: {', '.join(names)}"


def _slant(rows: list[VariantScore]) -> int:
    """Degrees by which long names are turned, so that they do not cover each other."""
    return 20 if sum(len(row.variant) for row in rows) > 60 else 0
