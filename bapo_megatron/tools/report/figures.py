"""The curves of the page: what each panel shows, and seeds as one band."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean
from typing import Any

from bapo_megatron.config.reward import BATCH_METRICS
from bapo_megatron.policy.adapters import LAYER_KINDS
from bapo_megatron.tools.report.checks import MIN_GROWN_MISMATCH
from bapo_megatron.tools.report.runs import RunGroup, RunRecord

_MAX_POINTS = 1500
"""Limit of a curve's points; of a longer one every n-th is kept."""
_ALL_POINTS = 8000
"""Limit of the points of one curve in a panel, over all groups."""
_ALL_NUMBERS = 500_000
"""Limit of the numbers in the curves of all metrics, about 4 MB."""
_MAX_OWN_PANELS = 8
"""Limit of the panels with one metric of a reward function; the page can draw the others."""
_MIN_PHASE_SHARE = 0.0005
_AXES = {"trained tokens": "train/trained_tokens", "generated tokens": "rollout/generated_tokens"}
"""Metric whose sum is on an axis."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One figure."""

    title: str
    unit: str
    metrics: Mapping[str, str] = field(default_factory=dict)
    """Metric of each curve, by its label."""
    by_set: tuple[str, str] | None = None
    """Beginning and end of metrics with one curve per data set."""
    min_sets: int = 2
    """Data sets from which on these curves are drawn."""
    scores: bool = False
    """Whether held-out accuracies are drawn in it, with their intervals."""
    log: bool = False
    """Logarithmic axis."""
    from_zero: bool = False
    """Whether the axis begins at 0 even where that hides changes."""
    min_top: float = 0.0
    """Values below it are noise: the axis reaches at least this high."""
    note: str = ""
    """Explanation below its title."""


PANELS = (
    Panel(
        "Reward and held-out accuracy",
        "mean",
        {"mean reward": "reward/mean"},
        scores=True,
        from_zero=True,
    ),
    Panel("Reward by data set", "mean reward", by_set=("data/", "/reward_mean"), from_zero=True),
    Panel("Held-out demonstrations", "nats per token", by_set=("heldout/", "/loss"), min_sets=1),
    Panel("Turns", "per response", {"mean": "rollout/turns_mean", "largest": "rollout/turns_max"}),
    Panel("Environment errors", "episodes", {"errors": "rollout/environment_errors"}, min_top=1.0),
    Panel("Policy entropy", "nats per token", {"entropy": "policy/entropy"}),
    Panel(
        "Clip bounds",
        "ratio",
        {"upper": "clip/high", "lower": "clip/low"},
        note="Tokens with A > 0 are clipped above the upper bound, those with A < 0 below the "
        "lower one.",
    ),
    Panel(
        "Clipped tokens",
        "fraction",
        {
            "upper bound": "clip/fraction_high",
            "lower bound": "clip/fraction_low",
            "dual clip": "clip/fraction_dual",
        },
    ),
    Panel(
        "Positive share of contributions",
        "fraction",
        {
            "before the search": "bapo/positive_share_start",
            "after it": "bapo/positive_share",
            "of the loss": "loss/positive_share",
        },
        note="Share of the tokens with A > 0 in the sum of |A| × clipped ratio: with the bounds at "
        "which each update's search starts, with those that it chose, and in the loss.",
    ),
    Panel(
        "Token age",
        "updates",
        {
            "mean": "rollout/age_mean",
            "90th percentile": "rollout/age_p90",
            "oldest": "rollout/age_max",
        },
    ),
    Panel(
        "Stale tokens",
        "fraction",
        {
            "sampled by older weights": "rollout/stale_token_share",
            "masked as stale": "rollout/masked_token_share",
        },
    ),
    Panel(
        "KL from the sampling policy",
        "nats per token",
        {"KL": "policy/kl_behaviour"},
        min_top=0.001,
        note="Estimate of KL(μ ‖ π): μ sampled the tokens, π is being trained.",
    ),
    Panel(
        "KL divergence",
        "nats per token",
        {"reference": "kl/reference", "teacher": "kl/teacher"},
        min_top=0.001,
        note="Reference: k3 estimate of KL(π ‖ reference). Teacher: mean of log μ − log π_teacher, "
        "or with a loss over the vocabulary the divergence that is minimised.",
    ),
    Panel(
        "Importance weights",
        "fraction",
        {
            "effective samples": "policy/effective_sample_share",
            "A < 0, ratio above 2": "policy/negative_doubled_share",
        },
        from_zero=True,
        note="Effective number of responses in an update, by their weights π / μ, over their "
        "number; fraction of tokens with A < 0 that have become more than twice as likely.",
    ),
    Panel(
        "Score centering",
        "share",
        {
            "likeliest tokens, by the policy": "centering/policy_mass_mean",
            "by the sampler": "centering/sampler_mass_mean",
            "removed scores over sampled ones": "centering/removed_ratio",
            "tokens at a limit": "centering/limited_share",
        },
        from_zero=True,
        note="Probability of the sampler's top_k tokens; absolute coefficients of the scores that "
        "centering removes, over those of sampled tokens; tokens whose scale outside the top_k is "
        "at its limit.",
    ),
    Panel(
        "Engine–trainer mismatch",
        "mean |Δ log-prob| of equal weights, nats",
        {
            "in the batch": "mismatch/logprob_abs_mean",
            "after a weight sync": "weight_sync/logprob_difference",
        },
        min_top=MIN_GROWN_MISMATCH,
        note="Only steps that trained tokens of the current weights, or verified a weight sync "
        "(rollout.weight_sync.verify), have a value.",
    ),
    Panel(
        "Experts",
        "load of the busiest expert over the mean",
        {"mean of layers": "router/load_mean", "worst layer": "router/load_max"},
    ),
    Panel(
        "Router replay",
        "share",
        {"agreement": "router/agreement_share", "replayed tokens": "router/replayed_share"},
        note="Fraction of the replayed experts that the trainer's routers would have chosen; "
        "fraction of tokens whose experts were replayed.",
    ),
    Panel(
        "Adapters: change of the weights",
        "‖α/r · B A‖ / ‖W‖",
        {kind: f"lora/{kind}/change_ratio" for kind in LAYER_KINDS},
        from_zero=True,
        note="Frobenius norms over all linears with adapters of a kind; W is the base.",
    ),
    Panel(
        "Adapters: norms of A and B",
        "Frobenius norm, log scale",
        {f"{p}, {kind}": f"lora/{kind}/{p.lower()}_norm" for p in "AB" for kind in LAYER_KINDS},
        log=True,
    ),
    Panel(
        "Loss",
        "mean of the updates",
        {"policy": "loss/policy", "demonstrations": "loss/demonstrations"},
        note="With the objective nll, the policy's loss is that of the demonstrations.",
    ),
    Panel(
        "Gradient norm",
        "before clipping, log scale",
        {"mean": "policy/grad_norm", "largest update": "policy/grad_norm_max"},
        log=True,
    ),
    Panel(
        "Response length",
        "tokens",
        {
            "mean": "rollout/response_tokens_mean",
            "A > 0": "rollout/positive_response_tokens_mean",
            "A < 0": "rollout/negative_response_tokens_mean",
            "longest": "rollout/response_tokens_max",
        },
    ),
    Panel(
        "Outcome of groups",
        "fraction",
        {"mixed rewards": "reward/mixed_groups", "solved": "reward/solved_groups"},
        note="All responses of a solved group are right. Only groups with mixed rewards teach: an "
        "update whose groups all have equal rewards is skipped.",
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
        "per engine",
        {"running": "engines/running", "waiting": "engines/waiting"},
    ),
)


def panels_of(groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """Return the panels that have a curve.

    A curve has ``group`` (its number), ``name``, ``x`` and ``y``; with several seeds ``y`` is their
    mean, and ``low`` and ``high`` the smallest and largest of them. ``points`` are accuracies with
    their intervals, one entry per run and evaluation set.
    """
    panels = []
    limit = min(_MAX_POINTS, max(100, _ALL_POINTS // len(groups)))
    for panel in (*PANELS[:2], *_reward_panels(groups), *PANELS[2:]):
        curves = _curves_of(panel, groups, limit)
        points = [
            {"group": number, **points}
            for number, group in enumerate(groups)
            for run in group.runs
            for points in (_scores_of(run) if panel.scores else [])
        ]
        if curves or points:
            keys = ("title", "unit", "log", "from_zero", "min_top", "note")
            about = {key: getattr(panel, key) for key in keys}
            panels.append({**about, "curves": curves, "points": points})
    return panels


def _reward_panels(groups: Sequence[RunGroup]) -> list[Panel]:
    """Return a panel of several reward functions, and one of each of their own metrics."""
    runs = [run for group in groups for run in group.runs]
    names = {name: f"reward/{name}" for run in runs for name in run.matching("reward/", "")}
    functions = {
        name: metric
        for name, metric in sorted(names.items())
        if "/" not in name and name not in BATCH_METRICS
    }
    metric_names = sorted(name for name in names if "/" in name)[:_MAX_OWN_PANELS]
    together = Panel("Reward functions", "mean, unweighted", functions, from_zero=True)
    alone = [Panel(names[name], "mean", {name: names[name]}) for name in metric_names]
    return [together, *alone] if len(functions) > 1 else alone


def metric_curves(groups: Sequence[RunGroup]) -> dict[str, list[dict[str, Any]]]:
    """Return the curves of every metric, as those of a panel, by its name."""
    names = sorted({name for group in groups for run in group.runs for name in run.metrics})
    series = sum(2 if len(group.runs) == 1 else 4 for group in groups)
    limit = min(_MAX_POINTS, max(10, _ALL_NUMBERS // (series * max(1, len(names)))))
    return {name: _curves_of(Panel(name, "", {name: name}), groups, limit) for name in names}


def _curves_of(panel: Panel, groups: Sequence[RunGroup], limit: int) -> list[dict[str, Any]]:
    return [
        {"group": number, "name": name, **curve}
        for number, group in enumerate(groups)
        for name, metric in _metrics_of(panel, group).items()
        if (curve := _curve_of(group.runs, metric, limit))
    ]


def progress_of(run: RunRecord) -> dict[str, list[float]]:
    """Return the ``step`` of each row, and what the run had used by then: tokens, prompts.

    Tokens are sums of metrics; an axis whose metric was never recorded is left out.
    """
    rows = [row for row in run.rows if row["step"] > 0]
    progress = {"step": [0.0, *(row["step"] for row in rows)]}
    for axis, metric in _AXES.items():
        if run.values(metric):
            used = accumulate((row.get(metric, 0.0) for row in rows), initial=0.0)
            progress[axis] = list(used)
    if isinstance(num_groups := run.settings.get("rollout.groups_per_step"), int):
        progress["prompts"] = [num_groups * step for step in progress["step"]]
    return {axis: list(_thinned(values, _MAX_POINTS)) for axis, values in progress.items()}


def _metrics_of(panel: Panel, group: RunGroup) -> Mapping[str, str]:
    if panel.by_set is None:
        return panel.metrics
    start, end = panel.by_set
    names = sorted({name for run in group.runs for name in run.matching(start, end)})
    return {name: f"{start}{name}{end}" for name in names} if len(names) >= panel.min_sets else {}


def _curve_of(
    runs: Sequence[RunRecord], metric: str, max_points: int
) -> dict[str, Sequence[float]]:
    """The ``x`` and ``y`` of a metric; of several runs their mean, with ``low`` and ``high``.

    It ends at the last step that all runs have reached. Empty where no run recorded it.
    """
    values: dict[float, list[float]] = {}
    for run in runs:
        for step, value in run.points(metric):
            values.setdefault(step, []).append(value)
    last = min(run.rows[-1]["step"] for run in runs)
    steps = _thinned(sorted(step for step in values if step <= last), max_points)
    if not steps:
        return {}
    curve = {"x": steps, "y": [rounded(fmean(values[step])) for step in steps]}
    if len(runs) > 1:
        curve["low"] = [rounded(min(values[step])) for step in steps]
        curve["high"] = [rounded(max(values[step])) for step in steps]
    return curve


def _thinned[T](values: Sequence[T], max_values: int) -> Sequence[T]:
    return values[:: max(1, math.ceil(len(values) / max_values))]


def _scores_of(run: RunRecord) -> list[dict[str, Any]]:
    scores = []
    for name in run.eval_sets:
        metric = f"eval/{name}/avg_at_k"
        rows = [row for row in run.rows if metric in row]
        scores.append(
            {
                "run": run.name,
                "name": f"{name}: accuracy",
                "x": [row["step"] for row in rows],
                "y": [rounded(row[metric]) for row in rows],
                "low": [rounded(row.get(f"{metric}_low", row[metric])) for row in rows],
                "high": [rounded(row.get(f"{metric}_high", row[metric])) for row in rows],
            }
        )
    return scores


def phases_of(run: RunRecord) -> dict[str, Any]:
    """Return the seconds of each phase by step, the longest phase first, and their shares.

    Phases of less than 0.05% of the time are left out.
    """
    metrics = {name.replace("_", " "): f"time/{name}_s" for name in run.matching("time/", "_s")}
    rows = [row for row in run.rows if not row.keys().isdisjoint(metrics.values())]
    rows = list(_thinned(rows, _MAX_POINTS))
    total_s = {name: math.fsum(run.values(metric)) for name, metric in metrics.items()}
    all_s = math.fsum(total_s.values())
    return {
        "run": run.name,
        "x": [row["step"] for row in rows],
        "phases": [
            {
                "name": name,
                "total_s": rounded(total_s[name]),
                "share": rounded(total_s[name] / all_s),
                "y": [rounded(row.get(metrics[name], 0.0)) for row in rows],
            }
            for name in sorted(metrics, key=lambda name: -total_s[name])
            if total_s[name] > _MIN_PHASE_SHARE * all_s
        ],
    }


def rounded(value: float, digits: int = 5) -> float:
    """Return the value with so many significant digits, to keep the page small."""
    return float(f"{value:.{digits}g}")
