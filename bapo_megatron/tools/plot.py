"""PNG figures with matplotlib: the panels of the report's curves."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.runtime.files import atomic_write_bytes
from bapo_megatron.tools.report.figures import panels_of
from bapo_megatron.tools.report.runs import group_runs, read_runs

_COLUMNS = 4
_LINE_STYLES = ("-", "--", ":", "-.")
_MARKERS = "osD^v"
_GREY = "0.35"


def draw_dynamics(run_dirs: Sequence[Path], out: Path) -> None:
    """Draw the training dynamics of runs, with the report's panels, and replace the PNG ``out``.

    Raises:
        ValueError: A run has no ``metrics.jsonl``, or an empty one.
    """
    buffer = io.BytesIO()
    dynamics_figure(run_dirs).savefig(buffer, format="png", dpi=130)
    atomic_write_bytes(out, buffer.getvalue())


def dynamics_figure(run_dirs: Sequence[Path]) -> Any:
    """Return the figure that ``draw_dynamics`` draws."""
    from matplotlib.figure import Figure  # takes a second
    from matplotlib.lines import Line2D

    groups, _ = group_runs(read_runs(run_dirs))
    panels, colors = panels_of(groups), _distinct_colors(len(groups))
    num_rows = max(1, math.ceil(len(panels) / _COLUMNS))
    figure = Figure(figsize=(4.8 * _COLUMNS, 3.6 * num_rows), layout="constrained")
    axes = figure.subplots(num_rows, _COLUMNS, squeeze=False).flat
    for panel, axis in zip(panels, axes, strict=False):
        _draw_panel(axis, panel, colors)
    for axis in axes:  # unused ones
        figure.delaxes(axis)
    if len(groups) == 1:
        figure.suptitle(_plain(groups[0].label))
    else:
        handles = [Line2D([], [], color=color, linewidth=2.5) for color in colors]
        labels = [_plain(group.label) for group in groups]
        above = {"loc": "outside upper center", "ncols": _COLUMNS, "frameon": False}
        figure.legend(handles, labels, **above)
    return figure


def _draw_panel(axis: Any, panel: Mapping[str, Any], colors: Sequence[Any]) -> None:
    """Draw an entry of ``panels_of``.

    Colours are the groups'. Line styles tell curves apart and markers evaluation sets; with one
    group, colours do too.
    """
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(part["name"] for part in (*panel["curves"], *panel["points"])))
    looks: dict[str, dict[str, Any]] = {}
    for part in (*panel["curves"], *panel["points"]):
        number = names.index(part["name"])
        color = colors[part["group"]] if len(colors) > 1 else f"C{number}"
        x, y = part["x"], part["y"]
        if "run" in part:  # the scores of one run
            look = {"linestyle": "", "marker": _MARKERS[number % len(_MARKERS)], "markersize": 5}
            below = [max(0.0, mean - low) for mean, low in zip(y, part["low"], strict=True)]
            above = [max(0.0, high - mean) for mean, high in zip(y, part["high"], strict=True)]
            axis.errorbar(x, y, [below, above], color=color, elinewidth=1, **look)
        else:
            look = {"linestyle": _LINE_STYLES[number % len(_LINE_STYLES)], "linewidth": 1.6}
            # A line shows no single point.
            single = {"marker": "o", "markersize": 4} if len(x) == 1 else {}
            axis.plot(x, y, color=color, **look | single)
            if "low" in part:
                axis.fill_between(x, part["low"], part["high"], color=color, alpha=0.15, lw=0)
        looks[_plain(part["name"])] = look | {"color": color if len(colors) == 1 else _GREY}
    axis.set_title(panel["title"], fontsize=11)
    axis.set_xlabel("step")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_ylabel(panel["unit"], fontsize=8)
    axis.set_yscale("log" if panel["log"] else "linear")
    axis.grid(alpha=0.3)
    handles = [Line2D([], [], **look) for look in looks.values()]
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "frameon": False}
    size = {"fontsize": 8, "ncols": 3, "handlelength": 1.6, "columnspacing": 1.0}
    axis.legend(handles, looks.keys(), **place, **size)


def _distinct_colors(num_colors: int) -> list[Any]:
    """Return ``num_colors`` distinct colours: those of a palette of ten, else hues."""
    from matplotlib import colormaps

    if num_colors <= 10:
        return [colormaps["tab10"](number) for number in range(num_colors)]
    return [colormaps["turbo"](number / (num_colors - 1)) for number in range(num_colors)]


def _plain(text: str) -> str:
    """The text as matplotlib draws it: ``$`` begins no formula, surrogates are escaped.

    Names of sets and runs may hold anything.
    """
    return text.encode(errors="backslashreplace").decode().replace("$", r"\$")
