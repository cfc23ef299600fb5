"""Tables and figures of tier A, from its shards alone.

python -m examples.study.report docs/study/tier_a
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np

from bapo_megatron.evaluation.estimators import holm
from bapo_megatron.runtime.files import atomic_write_text
from examples.study.shards import read_shards
from examples.study.statistics import Estimate, estimate
from examples.study.tier_a import CONTRASTS, PRIMARY_LAGS

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MultipleLocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

Row = dict[str, Any]
MARGIN = 0.02
"""Differences of expected reward within it do not matter; fixed beforehand."""
_COLLAPSE = 0.8
"""A run has collapsed if its final expected reward is below this fraction of its best."""
TITLES = {
    "grpo": "GRPO [0.8, 1.2]",
    "clip_higher": "clip-higher [0.8, 1.28]",
    "start": "start [0.6, 1.2]",
    "corner": "corner [0.9, 3.0]",
    "bapo": "BAPO (Eq. 8)",
    "bapo_gradient": "BAPO (Eq. 5)",
    "yoked": "yoked BAPO",
    "none": "no clip",
    "m2po": "M2PO",
    "cispo": "CISPO",
    "gspo": "GSPO",
}
"""The names of the arms in tables and figures."""
_DEFAULTS = {"updates": 16, "dual_clip": None, "target": None, "micro_batches": 1}


class Results:
    """The runs, by their settings."""

    def __init__(self, directory: Path) -> None:
        self.manifest = json.loads((directory / "manifest.json").read_text())
        self._rows: dict[tuple[Any, ...], list[Row]] = {}
        for row in read_shards(directory / "report"):
            self._rows.setdefault(self._key(row), []).append(row)
        for rows in self._rows.values():
            rows.sort(key=lambda row: (row["task"], row["seed"]))
        plan = self.manifest["plan"]
        self.shape = (len(plan["tasks"]), len(plan["seeds"]))
        self.arms: list[str] = plan["arms"]
        self.lags: list[int] = plan["lags"]
        self.rates: list[float] = plan["rates"]

    @staticmethod
    def _key(row: Row) -> tuple[Any, ...]:
        return (row["arm"], row["lag"], row["learning_rate"], *(row[name] for name in _DEFAULTS))

    def rows(self, arm: str, lag: int, rate: float | None = None, **others: Any) -> list[Row]:
        """Runs of a setting, tasks and seeds in order; ``rate`` None: the arm's best."""
        rate = self.best_rate(arm, lag) if rate is None else rate
        key = {"arm": arm, "lag": lag, "learning_rate": rate} | _DEFAULTS | others
        return self._rows.get(self._key(key), [])

    def best_rate(self, arm: str, lag: int) -> float:
        """The learning rate that was chosen on the tuning tasks."""
        return float(self.manifest["best_rates"][f"{arm}_lag{lag}"])

    def values(self, rows: list[Row], value: Callable[[Row], float]) -> NDArray[np.float64]:
        """[I, S] of what ``value`` reads from each run."""
        return np.array([value(row) for row in rows]).reshape(self.shape)


def final(row: Row) -> float:
    """Expected reward after the last step."""
    return float(row["expected_reward"][-1])


def best(row: Row) -> float:
    """Highest expected reward after any step."""
    return float(max(row["expected_reward"]))


def has_collapsed(row: Row) -> float:
    """1 where the final expected reward is far below the best, else 0."""
    return float(final(row) < _COLLAPSE * best(row))


def norm_ratio(row: Row) -> float:
    """Largest gradient norm over the median one."""
    return float(max(row["gradient_norm"]) / np.median(row["median_gradient_norm"]))


def entropy_slope(row: Row) -> float:
    """Nats per step, by least squares."""
    entropy = row["entropy"]
    return float(np.polyfit(np.arange(len(entropy)), entropy, 1)[0])


def contrasts(results: Results, lags: list[int], rate: float | None = None) -> dict[str, Estimate]:
    """BAPO's final expected reward minus that of each control, averaged over lags."""

    def mean_of(arm: str) -> NDArray[np.float64]:
        estimates = [results.values(results.rows(arm, lag, rate), final) for lag in lags]
        return np.mean(estimates, axis=0)

    bapo = mean_of("bapo")
    return {arm: estimate(bapo - mean_of(arm)) for arm in CONTRASTS}


def contrast_lines(results: Results) -> list[str]:
    """The four contrasts as a table."""
    lags = [lag for lag in PRIMARY_LAGS if lag in results.lags]
    estimates = contrasts(results, lags)
    corrected = holm([effect.p_value for effect in estimates.values()])
    lines = [
        f"Final expected reward, mean over lags {', '.join(map(str, lags))}, each arm at the "
        "learning rate chosen on the tuning tasks. 95 % intervals and p-values by hierarchical "
        "bootstrap, corrected by Holm; equivalent: the 90 % interval lies within "
        f"±{MARGIN:g}.",
        "",
        "| BAPO minus | difference | 95 % interval | p | corrected | equivalent |",
        "|---|---|---|---|---|---|",
    ]
    for (arm, effect), p_value in zip(estimates.items(), corrected, strict=True):
        lines.append(
            f"| {TITLES[arm]} | {effect.mean:+.3f} | {effect.low:+.3f} … {effect.high:+.3f} | "
            f"{effect.p_value:.4f} | {p_value:.4f} | "
            f"{'yes' if effect.is_within(MARGIN) else 'no'} |"
        )
    return lines


def lag_contrast_lines(results: Results, rate: float | None) -> list[str]:
    """The contrasts of each lag, without correction."""
    lines = [
        "| BAPO minus | " + " | ".join(f"lag {lag}" for lag in results.lags) + " |",
        "|---" * (len(results.lags) + 1) + "|",
    ]
    by_lag = [contrasts(results, [lag], rate) for lag in results.lags]
    for arm in CONTRASTS:
        cells = [
            f"{effect.mean:+.3f} ({effect.low:+.3f} … {effect.high:+.3f})"
            for effect in (effects[arm] for effects in by_lag)
        ]
        lines.append(f"| {TITLES[arm]} | " + " | ".join(cells) + " |")
    return lines


def _cell(rows: list[Row], results: Results, value: Callable[[Row], float] = final) -> str:
    if not rows:
        return ""
    effect = estimate(results.values(rows, value))
    return f"{effect.mean:.3f} ± {(effect.high - effect.low) / 2:.3f}"


def lag_lines(results: Results, rate: float | None) -> list[str]:
    """Final expected reward by arm and lag."""
    lines = [
        "| | " + " | ".join(f"lag {lag}" for lag in results.lags) + " |",
        "|---" * (len(results.lags) + 1) + "|",
    ]
    for arm in results.arms:
        cells = []
        for lag in results.lags:
            cell = _cell(results.rows(arm, lag, rate), results)
            cells.append(f"{cell} ({results.best_rate(arm, lag):g})" if rate is None else cell)
        lines.append(f"| {TITLES[arm]} | " + " | ".join(cells) + " |")
    return lines


def update_lines(results: Results, rate: float) -> list[str]:
    """Final expected reward by arm and number of updates per step, without lag."""
    updates = sorted([16, *results.manifest["plan"]["updates"]])
    lines = [
        "| | " + " | ".join(f"{count} updates" for count in updates) + " |",
        "|---" * (len(updates) + 1) + "|",
    ]
    for arm in results.arms:
        cells = [_cell(results.rows(arm, 0, rate, updates=count), results) for count in updates]
        lines.append(f"| {TITLES[arm]} | " + " | ".join(cells) + " |")
    return lines


def variant_lines(results: Results) -> list[str]:
    """Dual clip, ρ0 and scope at the fixed learning rates."""
    cases = [(lag, rate) for lag in (2, 8) if lag in results.lags for rate in results.rates]
    lines = [
        "| | " + " | ".join(f"lag {lag}, lr {rate:g}" for lag, rate in cases) + " |",
        "|---" * (len(cases) + 1) + "|",
    ]

    def add(title: str, arm: str, **others: Any) -> None:
        cells = [_cell(results.rows(arm, lag, rate, **others), results) for lag, rate in cases]
        if any(cells):
            lines.append(f"| {title} | " + " | ".join(cells) + " |")

    for arm in results.arms:
        add(TITLES[arm], arm)
        add(f"{TITLES[arm]}, dual clip 3", arm, dual_clip=3.0)
    for target in results.manifest["plan"]["targets"]:
        add(f"BAPO, ρ0 {target:g}", "bapo", target=target)
    add("BAPO, bounds of a quarter of the update", "bapo", micro_batches=4)
    return lines


def behaviour_lines(results: Results) -> list[str]:
    """What the runs did, at each arm's best learning rate and the largest lag."""
    lag = max(results.lags)
    columns: dict[str, Callable[[Row], float]] = {
        "best": best,
        "collapsed": has_collapsed,
        "entropy, nats per step": entropy_slope,
        "largest / median gradient norm": norm_ratio,
        "effective sample size": lambda row: row["effective_share"],
        "positive share, unclipped": lambda row: row["positive_share_before"],
        "clipped": lambda row: row["positive_share"],
        "tokens clipped above": lambda row: row.get("clip/fraction_high") or 0.0,
        "below": lambda row: row.get("clip/fraction_low") or 0.0,
    }
    lines = [f"| lag {lag} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for arm in results.arms:
        rows = results.rows(arm, lag)
        cells = [f"{results.values(rows, value).mean():.3g}" for value in columns.values()]
        lines.append(f"| {TITLES[arm]} | " + " | ".join(cells) + " |")
    return lines


def search_lines(results: Results) -> list[str]:
    """Where BAPO's searches end, by lag."""
    lines = [
        "| lag | learning rate | c_low | c_high | start | met | exhausted | share before | after |",
        "|---" * 9 + "|",
    ]
    names = ("low", "high", *(f"bapo/exit_{n}_share" for n in ("start", "met", "exhausted")))
    names += ("positive_share_before", "positive_share")
    for lag in results.lags:
        for rate in results.rates:
            rows = results.rows("bapo", lag, rate)
            cells = [
                f"{results.values(rows, lambda row, name=name: row[name]).mean():.3f}"
                for name in names
            ]
            lines.append(f"| {lag} | {rate:g} | " + " | ".join(cells) + " |")
    return lines


def tables(results: Results) -> str:
    """The markdown."""
    header = "; ".join(
        f"{entry['shards']} shards at commit {entry['commit']}, torch {entry['torch']}"
        for entry in results.manifest["made_with"]
    )
    tasks, seeds = results.shape
    lines = [
        "# Tier A: tables",
        "",
        f"Made by `python -m examples.study.report` from the shards in this directory ({header}). "
        f"{tasks} tasks × {seeds} sampling seeds per cell, {results.manifest['plan']['steps']} "
        "steps; ± is half of the 95 % interval. [What it means](../../study.md).",
        "",
        "## The four contrasts",
        "",
        *contrast_lines(results),
        "",
        "## The contrasts of each lag (exploratory; without correction)",
        "",
        *lag_contrast_lines(results, None),
        "",
        "## Final expected reward at the best learning rate, which is in brackets",
        "",
        *lag_lines(results, None),
    ]
    for rate in results.rates:
        lines += ["", f"## At learning rate {rate:g}", "", *lag_lines(results, rate)]
        lines += ["", *lag_contrast_lines(results, rate)]
    if results.manifest["plan"]["updates"]:
        for rate in results.rates:
            lines += ["", f"## Updates per step, without lag, at {rate:g}", ""]
            lines += update_lines(results, rate)
    lines += ["", "## Dual clip, target, scope", "", *variant_lines(results)]
    lines += ["", "## What the runs did", "", *behaviour_lines(results)]
    lines += ["", "## BAPO's searches", "", *search_lines(results)]
    return "\n".join(lines) + "\n"


def draw(results: Results, path: Path) -> None:
    """Draw the arms' results in the upper row, BAPO's searches in the lower one."""
    figure, (above, below) = plt.subplots(2, 3, figsize=(14, 8), layout="constrained")
    _draw_contrasts(results, above[0])
    shown = [arm for arm in ("grpo", "start", "corner", "bapo", "yoked") if arm in results.arms]
    _draw_lags(results, shown, above[1])
    _draw_curves(results, shown, above[2])
    _draw_search(results, list(below))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_lags(results: Results, shown: list[str], axes: Axes) -> None:
    for offset, arm in enumerate(shown):
        estimates = [
            estimate(results.values(results.rows(arm, lag), final)) for lag in results.lags
        ]
        mean = np.array([effect.mean for effect in estimates])
        axes.errorbar(
            np.arange(len(estimates)) + 0.08 * (offset - len(shown) / 2),
            mean,
            yerr=[
                mean - [effect.low for effect in estimates],
                np.array([effect.high for effect in estimates]) - mean,
            ],
            marker="o",
            markersize=4,
            capsize=2,
            label=TITLES[arm],
        )
    axes.set_xticks(range(len(results.lags)), [str(lag) for lag in results.lags])
    axes.set(xlabel="lag in steps of 16 updates", ylabel="final expected reward")
    axes.set_title("best learning rate of each arm and lag")
    axes.legend(fontsize=8)


def _draw_curves(results: Results, shown: list[str], axes: Axes) -> None:
    lag = max(results.lags)
    for arm in shown:
        curves = np.array([row["expected_reward"] for row in results.rows(arm, lag)])
        mean = curves.mean(axis=0)
        error = 1.96 * curves.std(axis=0) / np.sqrt(len(curves))
        (line,) = axes.plot(mean, label=TITLES[arm])
        axes.fill_between(
            np.arange(len(mean)), mean - error, mean + error, alpha=0.15, color=line.get_color()
        )
    axes.set(xlabel="step", ylabel="expected reward", title=f"lag {lag}, best learning rates")


_SEARCH_PANELS = (
    (
        "BAPO: share of positive tokens",
        {"before the search": "positive_share_before", "after it": "positive_share"},
    ),
    (
        "BAPO: how searches end",
        {name: f"bapo/exit_{name}_share" for name in ("start", "met", "exhausted")},
    ),
    (
        "BAPO: tokens outside the bounds",
        {"above": "clip/fraction_high", "below": "clip/fraction_low"},
    ),
)


def _draw_search(results: Results, panels: list[Axes]) -> None:
    """Means over runs against the lag, one line style per learning rate."""
    rates = sorted(results.rates)[-2:]
    for axes, (title, columns) in zip(panels, _SEARCH_PANELS, strict=True):
        for rate, style in zip(rates, ("-", "--"), strict=False):
            for number, (label, column) in enumerate(columns.items()):
                means = [
                    np.mean([row[column] for row in results.rows("bapo", lag, rate)])
                    for lag in results.lags
                ]
                axes.plot(means, style, marker=".", color=f"C{number}", label=f"{label}, {rate:g}")
        axes.set_xticks(range(len(results.lags)), [str(lag) for lag in results.lags])
        axes.set(xlabel="lag in steps of 16 updates", title=title)
        axes.legend(fontsize=7, title="learning rate", title_fontsize=7, handlelength=3.5)


def _draw_contrasts(results: Results, axes: Axes) -> None:
    groups = [[lag] for lag in results.lags] + [[n for n in PRIMARY_LAGS if n in results.lags]]
    for offset, lags in enumerate(groups):
        is_primary = offset == len(groups) - 1
        estimates = contrasts(results, lags)
        position = np.arange(len(estimates)) + 0.6 * (offset / len(groups) - 0.5)
        mean = np.array([effect.mean for effect in estimates.values()])
        axes.errorbar(
            mean,
            position,
            xerr=[
                mean - [effect.low for effect in estimates.values()],
                np.array([effect.high for effect in estimates.values()]) - mean,
            ],
            fmt="D" if is_primary else "o",
            markersize=6 if is_primary else 3.5,
            color="black" if is_primary else plt.colormaps["viridis"](offset / len(groups)),
            capsize=2,
            label="lags 2, 4, 8 together" if is_primary else f"lag {lags[0]}",
        )
    axes.axvspan(-MARGIN, MARGIN, color="grey", alpha=0.15)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(CONTRASTS)), [TITLES[arm] for arm in CONTRASTS])
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(MultipleLocator(0.05))
    axes.set(xlabel="final expected reward: BAPO minus …", title="95 % intervals; grey: equivalent")
    axes.legend(fontsize=7)


def write_report[ResultsT](
    description: str,
    read: Callable[[Path], ResultsT],
    tables: Callable[[ResultsT], str],
    draw: Callable[[ResultsT, Path], None],
) -> None:
    """Write ``tables.md`` and ``figure.png`` beside the shards that the command line names."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    results = read(directory)
    atomic_write_text(directory / "tables.md", tables(results))
    draw(results, directory / "figure.png")
    print(f"{directory / 'tables.md'}, {directory / 'figure.png'}")


if __name__ == "__main__":
    write_report(__doc__.partition("\n")[0], Results, tables, draw)
