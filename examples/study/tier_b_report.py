"""Tables and figure of tier B, from its shards alone.

    python -m examples.study.tier_b_report docs/study/tier_b

A seed is a model, its data and its run. Arms share them, so differences are formed per seed;
intervals and p-values are Student's over the seeds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from bapo_megatron.evaluation.estimators import difference_over_seeds, holm, student_interval
from examples.study.report import MARGIN, TITLES, write_report
from examples.study.shards import read_shards
from examples.study.tier_a import CONTRASTS

mpl.use("Agg")
import matplotlib.pyplot as plt
from numpy.typing import NDArray

Row = dict[str, Any]
Values = NDArray[np.float64]
_SEARCH = ("low", "high", "exit_start", "exit_met", "positive_share")


class Results:
    """The runs, by their settings; only seeds of which every arm and lag is there."""

    def __init__(self, directory: Path) -> None:
        self.manifest = json.loads((directory / "manifest.json").read_text())
        plan = self.manifest["plan"]
        self.arms: list[str] = plan["arms"]
        self.lags: list[int] = plan["lags"]
        self.rates: list[float] = plan["rates"]
        self._rows = {
            (row["arm"], row["lag"], row["learning_rate"], row["seed"]): row
            for row in read_shards(directory / "report")
        }
        self._seeds: list[int] = plan["seeds"]

    def rows(self, arm: str, lag: int, rate: float) -> list[Row]:
        """Runs of a setting, by seed."""
        return [self._rows[arm, lag, rate, seed] for seed in self.seeds(rate)]

    def seeds(self, rate: float) -> list[int]:
        """The seeds of which every arm and lag is there."""
        settings = [(arm, lag, rate) for arm in self.arms for lag in self.lags]
        return [
            seed
            for seed in self._seeds
            if all((*setting, seed) in self._rows for setting in settings)
        ]

    def accuracy(self, arm: str, lag: int, rate: float) -> Values:
        """Held-out accuracy after the last step, by seed."""
        return np.array([row["accuracy_after"] for row in self.rows(arm, lag, rate)])

    def differences(self, control: str, lags: list[int], rate: float) -> Values:
        """BAPO's accuracy minus the control's, by seed; means over lags."""
        return np.mean(
            [self.accuracy("bapo", lag, rate) - self.accuracy(control, lag, rate) for lag in lags],
            axis=0,
        )


def contrast_lines(results: Results, lags: list[int], rate: float) -> list[str]:
    """The four contrasts as a table."""
    differences = {arm: results.differences(arm, lags, rate) for arm in CONTRASTS}
    tests = {arm: difference_over_seeds(values) for arm, values in differences.items()}
    corrected = holm([test.p_value for test in tests.values()])
    lines = [
        "| BAPO minus | difference | 95 % interval | p | corrected | equivalent | seeds above |",
        "|---" * 7 + "|",
    ]
    for (arm, test), p_value in zip(tests.items(), corrected, strict=True):
        low, high = student_interval(differences[arm], 0.9)
        is_equivalent = low > -MARGIN and high < MARGIN
        lines.append(
            f"| {TITLES[arm]} | {test.difference:+.3f} | {test.low:+.3f} … {test.high:+.3f} | "
            f"{test.p_value:.4f} | {p_value:.4f} | {'yes' if is_equivalent else 'no'} | "
            f"{(differences[arm] > 0).sum()} of {len(differences[arm])} |"
        )
    return lines


def half_width(values: Values) -> float:
    """Half of Student's 95 % interval of the mean."""
    low, high = student_interval(values)
    return (high - low) / 2


def accuracy_lines(results: Results, rate: float) -> list[str]:
    """Held-out accuracy by arm and lag."""
    heads = [f"{len(results.seeds(rate))} seeds", *(f"lag {lag}" for lag in results.lags)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for arm in results.arms:
        cells = []
        for lag in results.lags:
            values = results.accuracy(arm, lag, rate)
            cells.append(f"{values.mean():.3f} ± {half_width(values):.3f}")
        lines.append(f"| {TITLES[arm]} | " + " | ".join(cells) + " |")
    return lines


def behaviour_lines(results: Results, rate: float) -> list[str]:
    """What the runs did, by lag and arm; means over seeds and steps."""
    heads = ("best reward", "last entropy", "gradient norm", "clipped above", "below")
    heads += ("c_low", "c_high", "start", "met", "positive share")
    lines = ["| lag | arm | " + " | ".join(heads) + " |", "|---" * (len(heads) + 2) + "|"]
    for lag in results.lags:
        for arm in results.arms:
            rows = results.rows(arm, lag, rate)
            cells = [
                f"{np.mean([np.nanmax(curve(row, 'reward')) for row in rows]):.3f}",
                f"{np.mean([curve(row, 'entropy')[-1] for row in rows]):.3f}",
                *(
                    f"{np.nanmean([np.nanmean(curve(row, name)) for row in rows]):.3f}"
                    for name in ("gradient_norm", "clipped_high", "clipped_low")
                ),
            ]
            for name in _SEARCH:
                values = np.concatenate([curve(row, name) for row in rows])
                has_any = bool(np.isfinite(values).any())
                cells.append(f"{np.nanmean(values):.3f}" if has_any else "")
            lines.append(f"| {lag} | {TITLES[arm]} | " + " | ".join(cells) + " |")
    return lines


def curve(row: Row, name: str) -> Values:
    """A number per step; NaN where a step had none."""
    values = row.get(name) or [None]
    return np.array([np.nan if value is None else value for value in values])


def tables(results: Results) -> str:
    """The markdown."""
    header = "; ".join(
        f"{entry['shards']} shards at commit {entry['commit']}, torch {entry['torch']}"
        for entry in results.manifest["made_with"]
    )
    stale = [lag for lag in results.lags if lag]
    lines = [
        "# Tier B: tables",
        "",
        f"Made by `python -m examples.study.tier_b_report` from the shards in this directory "
        f"({header}). {results.manifest['plan']['steps']} steps of 16 updates; held-out accuracy "
        "after the last step; ± is half of Student's 95 % interval over seeds. "
        "[What it means](../../study.md).",
    ]
    for rate in results.rates:
        lines += ["", f"## Learning rate {rate:g}", "", *accuracy_lines(results, rate)]
        for lags in ([stale] if len(stale) > 1 else []) + [[lag] for lag in results.lags]:
            title = "lag " + ", ".join(map(str, lags))
            lines += ["", f"### Contrasts, {title}", "", *contrast_lines(results, lags, rate)]
        lines += ["", "### What the runs did", "", *behaviour_lines(results, rate)]
    return "\n".join(lines) + "\n"


def draw(results: Results, path: Path) -> None:
    """Differences over lag, and curves at the largest lag, a row per learning rate."""
    rows = len(results.rates)
    figure, grid = plt.subplots(
        rows, 3, figsize=(14, 4.2 * rows), layout="constrained", squeeze=False
    )
    lag = max(results.lags)
    for rate, (left, middle, right) in zip(results.rates, grid, strict=True):
        for offset, arm in enumerate(CONTRASTS):
            differences = [results.differences(arm, [lag], rate) for lag in results.lags]
            left.errorbar(
                np.arange(len(differences)) + 0.12 * (offset - (len(CONTRASTS) - 1) / 2),
                [difference.mean() for difference in differences],
                yerr=[half_width(difference) for difference in differences],
                fmt="o",
                markersize=4,
                capsize=2,
                color=f"C{results.arms.index(arm)}",
                label=TITLES[arm],
            )
        for arm in results.arms:
            for axes, name in ((middle, "reward"), (right, "entropy")):
                curves = np.array([curve(row, name) for row in results.rows(arm, lag, rate)])
                mean, error = curves.mean(axis=0), half_widths(curves)
                step = np.arange(1, len(mean) + 1)
                (line,) = axes.plot(step, mean, label=TITLES[arm])
                axes.fill_between(
                    step, mean - error, mean + error, alpha=0.15, color=line.get_color()
                )
        left.set_xticks(range(len(results.lags)), [str(lag) for lag in results.lags])
        left.axhspan(-MARGIN, MARGIN, color="grey", alpha=0.15)
        left.axhline(0, color="grey", linewidth=0.8)
        left.set(xlabel="lag in steps of 16 updates", ylabel="held-out accuracy: BAPO minus …")
        left.set_title(f"learning rate {rate:g}, 95 % intervals; grey: equivalent")
        left.legend(fontsize=8)
        middle.set(xlabel="step", ylabel="mean reward of the batch", title=f"lag {lag}")
        middle.legend(fontsize=8)
        right.set(xlabel="step", ylabel="entropy, nats per token", title=f"lag {lag}")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def half_widths(curves: Values) -> Values:
    """``half_width`` of each column."""
    return np.array([half_width(column) for column in curves.T])


if __name__ == "__main__":
    write_report(__doc__.partition("\n")[0], Results, tables, draw)
