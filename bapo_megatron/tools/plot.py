"""A figure of training dynamics from the ``metrics.jsonl`` of one or several runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.tools.report.figures import MAX_POINTS, curve_of, distinct_colors
from bapo_megatron.tools.report.runs import RunGroup, group_runs, read_runs

PANELS = {
    "Reward": {"mean reward": "reward/mean"},
    "Entropy of the policy": {"entropy (nats)": "policy/entropy"},
    "Positive share of the contributions": {
        "before the search": "bapo/positive_share_start",
        "after the search": "bapo/positive_share",
        "of the loss": "loss/positive_share",
    },
    "Clip bounds": {"upper": "clip/high", "lower": "clip/low"},
    "Gradient norm before clipping": {
        "largest update": "policy/grad_norm_max",
        "mean": "policy/grad_norm",
    },
    "Response tokens by the sign of the advantage": {
        "A > 0": "rollout/positive_response_tokens_mean",
        "A < 0": "rollout/negative_response_tokens_mean",
    },
    "Clipped tokens": {
        "above the upper bound": "clip/fraction_high",
        "below the lower bound": "clip/fraction_low",
        "above the dual clip": "clip/fraction_dual",
    },
    "Share of stale tokens": {
        "sampled by older weights": "rollout/stale_token_share",
        "masked for their age": "rollout/masked_token_share",
    },
    "Age of tokens in a new batch (updates)": {
        "oldest": "rollout/age_max",
        "90th percentile": "rollout/age_p90",
        "mean": "rollout/age_mean",
    },
}
"""Metric of each line, by its label, of each panel, by its title."""

_LINE_STYLES = ("-", "--", ":")
_MARKERS = "osD^v"
_LEGEND_COLUMNS = 4
_GREY = "0.35"


def dynamics_figure(run_dirs: Sequence[Path]) -> Any:
    """Return matplotlib's figure of the training dynamics of runs: a panel for each of ``PANELS``.

    Raises:
        ValueError: A run has no ``metrics.jsonl``, or an empty one.
    """
    from matplotlib.figure import Figure  # takes a second
    from matplotlib.lines import Line2D

    groups, _ = group_runs(read_runs(run_dirs))
    colors = distinct_colors(len(groups))
    figure = Figure(figsize=(14, 11), layout="constrained")
    for axis, title in zip(figure.subplots(3, 3).flat, PANELS, strict=True):
        _draw_panel(axis, title, groups, colors)
    if len(groups) == 1:
        figure.suptitle(_plain(groups[0].label))
    else:
        handles = [Line2D([], [], color=color, linewidth=2.5) for color in colors]
        labels = [_plain(group.label) for group in groups]
        figure.legend(
            handles, labels, loc="outside upper center", ncols=_LEGEND_COLUMNS, frameon=False
        )
    return figure


def _plain(text: str) -> str:
    """The text as matplotlib draws it: ``$`` begins no formula, halves of surrogate pairs are told.

    Names of sets and runs may hold anything.
    """
    return text.encode(errors="backslashreplace").decode().replace("$", r"\$")


def _draw_panel(axis: Any, title: str, groups: Sequence[RunGroup], colors: Sequence[Any]) -> None:
    """Draw each series of a panel: by its line, and where there is one group by its colour too."""
    from matplotlib.lines import Line2D

    legend: dict[str, Any] = {}
    for number, (label, metric) in enumerate(PANELS[title].items()):
        style, own = _LINE_STYLES[number], f"C{number}" if len(groups) == 1 else None
        for group, color in zip(groups, colors, strict=True):
            curve = curve_of(group.runs, metric, MAX_POINTS)
            if not curve:
                continue
            x, shade = curve["x"], own or color
            axis.plot(x, curve["y"], style, color=shade, linewidth=1.6)
            if "low" in curve:
                axis.fill_between(x, curve["low"], curve["high"], color=shade, alpha=0.15, lw=0)
            legend[label] = Line2D([], [], linestyle=style, color=own or _GREY, linewidth=1.6)
    if title == "Reward":
        legend |= _draw_scores(axis, groups, colors)
    axis.set_title(title, fontsize=11)
    axis.set_xlabel("step")
    axis.grid(alpha=0.3)
    if legend:
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "frameon": False}
        tight = {"fontsize": 8, "ncols": len(legend), "handlelength": 1.6, "columnspacing": 1.0}
        axis.legend(legend.values(), legend.keys(), **below, **tight)


def _draw_scores(axis: Any, groups: Sequence[RunGroup], colors: Sequence[Any]) -> dict[str, Any]:
    """Draw the held-out accuracies, the mean of a group's runs; return what its legend needs."""
    from matplotlib.lines import Line2D

    runs = [run for group in groups for run in group.runs]
    names = sorted({name for run in runs for name in run.eval_sets})
    legend = {}
    for number, name in enumerate(names):
        marker = _MARKERS[number % len(_MARKERS)]
        for group, color in zip(groups, colors, strict=True):
            curve = curve_of(group.runs, f"eval/{name}/avg_at_k", MAX_POINTS)
            shade = f"C{number + 1}" if len(groups) == 1 else color
            if curve:
                axis.plot(curve["x"], curve["y"], marker, color=shade, markersize=5)
        shade = f"C{number + 1}" if len(groups) == 1 else _GREY
        legend[_plain(f"{name}: accuracy")] = Line2D(
            [], [], marker=marker, linestyle="", color=shade
        )
    return legend
