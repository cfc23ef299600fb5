"""Tables of tier D, from its shards alone.

python -m examples.study.tier_d_report docs/study/tier_d

Shape legend: I = tasks, S = seeds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bapo_megatron.evaluation.estimators import difference_over_seeds, holm, student_interval
from bapo_megatron.runtime.files import atomic_write_text
from examples.study.shards import read_shards

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from examples.study.tier_d import Condition

MARGIN = 0.02
OUTCOMES: dict[str, tuple[Condition, ...]] = {
    "stale": ((0, 2), (0, 4), (0, 8)),
    "biased": ((4, 0),),
    "both": ((4, 4), (4, 8)),
}
"""The conditions, bits and lag, over which a primary outcome is the mean."""
_CENTERED = ("reinforce", "truncated", "masked", "bapo")
CONTRASTS = (
    *((f"{arm}_centered", arm) for arm in _CENTERED),
    *(("reinforce_centered", arm) for arm in ("bapo", "corner", "truncated")),
    ("bapo", "grpo"),
    ("bapo", "yoked"),
)
LANGUAGE = "language_model.json"
LANGUAGE_ARMS = ("reinforce-centered", "truncated-centered", "corner")


class Results:
    """The reported runs, by arm and condition."""

    def __init__(self, directory: Path) -> None:
        self.manifest = json.loads((directory / "manifest.json").read_text())
        plan = self.manifest["plan"]
        self.arms: list[str] = plan["arms"]
        self.conditions: list[Condition] = [(bits, lag) for bits, lag in plan["conditions"]]
        file = directory / LANGUAGE
        self.right: dict[str, list[int]] = (
            json.loads(file.read_text())["right_of_300"] if file.exists() else {}
        )
        """Right answers of the language model's runs, by arm and seed."""
        self._shape = (len(plan["tasks"]), len(plan["seeds"]))
        self._rows: dict[tuple[str, Condition], list[dict[str, Any]]] = {}
        for row in read_shards(directory / "report"):
            self._rows.setdefault((row["arm"], (row["bits"], row["lag"])), []).append(row)
        for rows in self._rows.values():
            rows.sort(key=lambda row: (row["task"], row["seed"]))

    def rate(self, arm: str, condition: Condition) -> float:
        """The learning rate that was chosen on the tuning tasks."""
        return float(self._rows[arm, condition][0]["learning_rate"])

    def mean(self, arm: str, condition: Condition, column: str) -> float | None:
        """The mean of a column, of its last entry for a curve; None where it has no values."""
        values = [row[column] for row in self._rows[arm, condition]]
        if None in values:
            return None
        return float(np.mean([v[-1] if isinstance(v, list) else v for v in values]))

    def final_of(self, arm: str, conditions: tuple[Condition, ...]) -> NDArray[np.float64]:
        """Final expected reward of each task, mean over conditions and seeds."""
        finals = [
            np.array([row["expected_reward"][-1] for row in self._rows[arm, condition]])
            for condition in conditions
        ]
        final_I: NDArray[np.float64] = np.mean(finals, axis=0).reshape(self._shape).mean(axis=1)
        return final_I


def _title(condition: Condition) -> str:
    bits, lag = condition
    return f"{f'{bits} bits' if bits else 'exact'}, lag {lag}"


def contrast_lines(results: Results) -> list[str]:
    """Every registered contrast of every primary outcome, one family."""
    cases = [(outcome, a, b) for outcome in OUTCOMES for a, b in CONTRASTS]
    differences = [
        results.final_of(a, OUTCOMES[outcome]) - results.final_of(b, OUTCOMES[outcome])
        for outcome, a, b in cases
    ]
    effects = [difference_over_seeds(difference_I, 1.0) for difference_I in differences]
    corrected = holm([effect.p_value for effect in effects])
    lines = [
        "| outcome | contrast | difference | 95 % interval | p | corrected | equivalent |",
        "|---" * 7 + "|",
    ]
    for case, difference_I, effect, p_value in zip(
        cases, differences, effects, corrected, strict=True
    ):
        outcome, a, b = case
        low, high = student_interval(difference_I, 0.9)
        mean = f"{effect.difference:+.3f}"
        lines.append(
            f"| {outcome} | {a} − {b} | {f'**{mean}**' if p_value < 0.05 else mean} | "
            f"{effect.low:+.3f} … {effect.high:+.3f} | {effect.p_value:.2g} | {p_value:.2g} | "
            f"{'yes' if low > -MARGIN and high < MARGIN else 'no'} |"
        )
    return lines


def language_lines(results: Results) -> list[str]:
    """The six registered contrasts of the language model's runs, in points."""
    cases = [(arm, other) for arm in LANGUAGE_ARMS for other in ("bapo", "grpo")]
    points = [(np.array(results.right[a]) - np.array(results.right[b])) / 3 for a, b in cases]
    effects = [difference_over_seeds(points_S, 100.0) for points_S in points]
    corrected = holm([effect.p_value for effect in effects])
    lines = ["| contrast | points | 95 % interval | corrected p |", "|---" * 4 + "|"]
    for (arm, other), effect, p_value in zip(cases, effects, corrected, strict=True):
        numbers = f"{effect.difference:+.1f} | {effect.low:+.1f} … {effect.high:+.1f}"
        numbers = numbers.replace("-", "−")
        lines.append(f"| {arm} − {other.upper()} | {numbers} | {p_value:.2g} |")
    return lines


def final_lines(results: Results) -> list[str]:
    """Final expected reward by arm and condition, with half of its interval and the rate."""
    titles = map(_title, results.conditions)
    lines = [f"| | {' | '.join(titles)} |", "|---" * (len(results.conditions) + 1) + "|"]
    for arm in results.arms:
        cells = []
        for condition in results.conditions:
            final_I = results.final_of(arm, (condition,))
            low, high = student_interval(final_I)
            rate = results.rate(arm, condition)
            cells.append(f"{final_I.mean():.3f} ± {(high - low) / 2:.3f} ({rate:g})")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines


_COLUMNS = {
    "KL(q, p)": "kl",
    "entropy at the end": "entropy",
    "largest / median gradient norm": "largest_norm_ratio",
    "norm removed / gradient's": "removed_share",
    "c_low": "low",
    "c_high": "high",
}


def behaviour_lines(results: Results, condition: Condition) -> list[str]:
    """What the runs of a condition did."""
    lines = [
        f"| {_title(condition)} | {' | '.join(_COLUMNS)} |",
        "|---" * (len(_COLUMNS) + 1) + "|",
    ]
    for arm in results.arms:
        means = [results.mean(arm, condition, column) for column in _COLUMNS.values()]
        cells = ["" if mean is None else f"{mean:.3g}" for mean in means]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines


def tables(results: Results) -> str:
    """The markdown."""
    plan, made_with = results.manifest["plan"], results.manifest["made_with"]
    header = "; ".join(f"{e['shards']} shards at commit {e['commit']}" for e in made_with)
    lines = [
        "# Tier D: tables",
        "",
        f"Made by `python -m examples.study.tier_d_report` from the shards in this directory "
        f"({header}): {len(plan['tasks'])} tasks × {len(plan['seeds'])} seeds per cell, "
        f"{plan['steps']} steps. [What it means](../tier_d.md).",
        "",
        "## Registered contrasts",
        "",
        "Final expected reward, paired by task and seed; Student's intervals and p-values over "
        f"tasks, corrected by Holm over all {len(OUTCOMES) * len(CONTRASTS)}. Bold: below 0.05. "
        f"Equivalent: the 90 % interval lies within ±{MARGIN:g}.",
        "",
        *contrast_lines(results),
        "",
        "## Final expected reward (learning rate)",
        "",
        "± is half of the 95 % interval over tasks, without pairing.",
        "",
        *final_lines(results),
    ]
    if results.right:
        lines += ["", "## The language model", "", *language_lines(results)]
    for condition in results.conditions:
        lines += ["", f"## What the runs did: {_title(condition)}", ""]
        lines += behaviour_lines(results, condition)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write ``tables.md`` beside the shards that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    atomic_write_text(directory / "tables.md", tables(Results(directory)))
    print(directory / "tables.md")


if __name__ == "__main__":
    main()
