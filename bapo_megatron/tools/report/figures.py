"""The curves of the page: what each panel shows, and the seeds of a configuration as one band.

The colours and axes of the page are its own business (figures.js); PNGs share the palette here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from bapo_megatron.tools.report.checks import MIN_GROWN_MISMATCH
from bapo_megatron.tools.report.runs import Run, RunGroup

MAX_POINTS = 1500
"""Points of a curve; of a longer one every n-th is kept."""
_ALL_POINTS = 8000
"""Points of the curves of all groups in one panel, by which their number is limited further."""
_DIGITS = 5
_MIN_PHASE_SHARE = 0.0005


@dataclass(frozen=True, slots=True)
class Panel:
    """One figure."""

    title: str
    unit: str
    metrics: Mapping[str, str] = field(default_factory=dict)
    """Metric of each curve, by its label."""
    each: str = ""
    """Pattern of metrics with one curve per match, such as ``data/*/reward_mean``; drawn if at
    least two match."""
    scores: bool = False
    """Whether held-out accuracies are drawn in it, with their intervals."""
    log: bool = False
    """Logarithmic axis."""
    from_zero: bool = False
    """Whether the axis begins at 0 even where that hides changes."""
    min_top: float = 0.0
    """Values below it are noise: the axis reaches at least this high."""
    note: str = ""
    """What a reader must know of it, below its title."""


PANELS = (
    Panel(
        *("Reward and held-out accuracy", "means", {"mean reward": "reward/mean"}),
        scores=True,
        from_zero=True,
    ),
    Panel("Reward by data set", "mean reward", each="data/*/reward_mean", from_zero=True),
    Panel("Entropy of the policy", "nats per token", {"entropy": "policy/entropy"}),
    Panel(
        "Clip bounds",
        "ratio",
        {"upper": "clip/high", "lower": "clip/low"},
        note=(
            "Tokens of positive advantage no longer count above the upper bound, those of negative "
            "advantage below the lower one."
        ),
    ),
    Panel(
        "Clipped tokens",
        "share",
        {"above the upper bound": "clip/fraction_high", "below the lower": "clip/fraction_low"},
    ),
    Panel(
        "Positive share of the contributions",
        "share",
        {"before the search": "bapo/positive_share_start", "after it": "bapo/positive_share"},
        note=(
            "Share of the tokens with positive advantage in the sum of all |A| × clipped ratio: at "
            "the bounds where each update's search starts, and at those that it chose."
        ),
    ),
    Panel(
        "Age of the tokens in a batch",
        "updates",
        {"mean": "rollout/age_mean", "90th percentile": "rollout/age_p90"},
    ),
    Panel(
        "Distance from the sampling policy",
        "nats per token",
        {"KL": "policy/kl_behaviour"},
        min_top=0.001,
        note="Estimate of KL(μ ‖ π): μ sampled the tokens, at their age, and π is being trained.",
    ),
    Panel(
        "Engine against trainer",
        "mean |Δ log-prob| of equal weights, nats",
        {
            "in the batch": "mismatch/logprob_abs_mean",
            "checked after weight sync": "weight_sync/logprob_difference",
        },
        min_top=MIN_GROWN_MISMATCH,
        note=(
            "Only steps that trained tokens of the current weights, or checked a weight "
            "sync (rollout.weight_sync.verify), have a value."
        ),
    ),
    Panel(
        "Gradient norm before clipping",
        "logarithmic axis",
        {"mean": "policy/grad_norm", "largest update": "policy/grad_norm_max"},
        log=True,
    ),
    Panel(
        "Response length",
        "tokens",
        {"mean": "rollout/response_tokens_mean", "longest": "rollout/response_tokens_max"},
    ),
    Panel(
        "Outcome of groups",
        "share",
        {"mixed rewards": "reward/mixed_groups", "solved": "reward/solved_groups"},
        note=(
            "A solved group has right responses only. Only mixed ones teach: an update whose "
            "groups all have equal rewards is skipped."
        ),
    ),
    Panel(
        "Throughput",
        "tokens/s",
        {
            "generated": "throughput/generated_tokens_per_s",
            "trained": "throughput/trained_tokens_per_s",
        },
    ),
    Panel(
        "Requests in the engines",
        "requests per engine",
        {"sampled": "engines/running", "waiting": "engines/waiting"},
    ),
)


def panels_of(groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """Return the panels that have a curve.

    A curve has ``group`` (its number), ``name``, ``x`` and ``y``; with several seeds ``y`` is their
    mean, and ``low`` and ``high`` the smallest and largest of them. ``points`` are accuracies with
    their intervals, one entry per run and evaluation set.
    """
    found = []
    limit = min(MAX_POINTS, max(100, _ALL_POINTS // len(groups)))
    for panel in PANELS:
        curves = [
            {"group": number, "name": name, **curve}
            for number, group in enumerate(groups)
            for name, metric in _metrics_of(panel, group).items()
            if (curve := curve_of(group.runs, metric, limit))
        ]
        points = [
            {"group": number, **points}
            for number, group in enumerate(groups)
            for run in group.runs
            for points in (_scores(run) if panel.scores else [])
        ]
        if curves or points:
            keys = ("title", "unit", "log", "from_zero", "min_top", "note")
            about = {key: getattr(panel, key) for key in keys}
            found.append({**about, "curves": curves, "points": points})
    return found


def _metrics_of(panel: Panel, group: RunGroup) -> Mapping[str, str]:
    if not panel.each:
        return panel.metrics
    start, end = panel.each.split("*")
    names = sorted({name for run in group.runs for name in run.matching(start, end)})
    return {name: f"{start}{name}{end}" for name in names} if len(names) > 1 else {}


def curve_of(runs: Sequence[Run], metric: str, max_points: int) -> dict[str, list[float]]:
    """Return ``x`` and ``y`` of a metric; of several runs their mean, with ``low`` and ``high``.

    It ends at the last step that all runs have reached. Empty where no run recorded it; of a longer
    curve than ``max_points`` every n-th step is kept.
    """
    values: dict[float, list[float]] = {}
    for run in runs:
        for step, value in run.points(metric):
            values.setdefault(step, []).append(value)
    last = min(run.rows[-1]["step"] for run in runs)
    steps = sorted(step for step in values if step <= last)
    steps = steps[:: math.ceil(len(steps) / max_points)] if steps else []
    if not steps:
        return {}
    curve = {"x": steps, "y": [rounded(fmean(values[step])) for step in steps]}
    if len(runs) > 1:
        curve["low"] = [rounded(min(values[step])) for step in steps]
        curve["high"] = [rounded(max(values[step])) for step in steps]
    return curve


def _scores(run: Run) -> list[dict[str, Any]]:
    found = []
    for name in run.eval_sets:
        start = f"eval/{name}/avg_at_k"
        rows = [row for row in run.rows if start in row]
        found.append(
            {
                "run": run.name,
                "name": f"{name}: accuracy",
                "x": [row["step"] for row in rows],
                "y": [rounded(row[start]) for row in rows],
                "low": [rounded(row.get(f"{start}_low", row[start])) for row in rows],
                "high": [rounded(row.get(f"{start}_high", row[start])) for row in rows],
            }
        )
    return found


def phases_of(run: Run) -> dict[str, Any]:
    """Return the seconds of each phase by step, the longest phase first, and their shares.

    Phases of less than 0.05% of the time are left out.
    """
    names = run.matching("time/", "_s")
    rows = [row for row in run.rows if any(f"time/{name}_s" in row for name in names)]
    rows = rows[:: max(1, math.ceil(len(rows) / MAX_POINTS))]
    total_s = {name: math.fsum(run.values(f"time/{name}_s")) for name in names}
    all_s = math.fsum(total_s.values())
    return {
        "run": run.name,
        "x": [row["step"] for row in rows],
        "phases": [
            {
                "name": name.replace("_", " "),
                "total_s": rounded(total_s[name]),
                "share": rounded(total_s[name] / all_s),
                "y": [rounded(row.get(f"time/{name}_s", 0.0)) for row in rows],
            }
            for name in sorted(names, key=lambda name: -total_s[name])
            if total_s[name] > _MIN_PHASE_SHARE * all_s
        ],
    }


def rounded(value: float, digits: int = _DIGITS) -> float:
    """Return the value with so many significant digits, to keep the page small."""
    return float(f"{value:.{digits}g}")


def distinct_colors(num_colors: int) -> list[Any]:
    """Return ``num_colors`` distinct colours.

    They are those of matplotlib's palettes as far as these go, then hues in between.
    """
    from matplotlib import colormaps

    for name in ("tab10", "tab20"):
        if num_colors <= colormaps[name].N:
            return [colormaps[name](number) for number in range(num_colors)]
    return [colormaps["turbo"](number / (num_colors - 1)) for number in range(num_colors)]
