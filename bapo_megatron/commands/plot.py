"""``bapo-megatron plot``: training dynamics from the ``metrics.jsonl`` of one or several runs."""

import io
import os
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import typer

from bapo_megatron.files import atomic_write_bytes
from bapo_megatron.telemetry.sinks import read_metrics

PANELS = {
    "Reward": {"mean reward": "reward/mean"},
    "Entropy of the policy": {"entropy (nats)": "policy/entropy"},
    "Positive share of the contributions": {
        "before the search": "bapo/positive_share_start",
        "after the search": "bapo/positive_share",
        "of the loss": "loss/positive_share",
    },
    "Clip bounds": {"upper": "bapo/clip_high", "lower": "bapo/clip_low"},
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

_LINE_STYLES = ("-", "--", ":", "-.")


def command(
    run_dirs: Annotated[list[Path], typer.Argument(help="One or several run directories.")],
    out: Annotated[Path | None, typer.Option(help="By default RUN_DIR/dynamics.png.")] = None,
) -> None:
    """Draw the training dynamics of one or several runs as a PNG."""
    target = out or run_dirs[0] / "dynamics.png"
    draw_dynamics(run_dirs, target)
    typer.echo(f"drew {target}")


def draw_dynamics(run_dirs: Sequence[Path], out: Path) -> None:
    """Draw the training dynamics of runs, each in its own line style, and replace ``out``.

    Raises:
        ValueError: A run has no ``metrics.jsonl``, or an empty one.
    """
    from matplotlib.figure import Figure  # takes a second

    are_unique = len({run_dir.name for run_dir in run_dirs}) == len(run_dirs)
    runs = {run_dir.name if are_unique else str(run_dir): _load(run_dir) for run_dir in run_dirs}
    figure = Figure(figsize=(14, 10), layout="constrained")
    axes = figure.subplots(3, 3)
    for axis, title in zip(axes.flat, PANELS, strict=True):
        _draw_panel(axis, title, runs)
    figure.suptitle(", ".join(runs))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    atomic_write_bytes(out, buffer.getvalue())


def _draw_panel(axis: Any, title: str, runs: dict[str, list[dict[str, float]]]) -> None:
    series = PANELS[title]

    def describe(run_name: str, label: str) -> str:
        return label if len(runs) == 1 else f"{run_name}: {label}"

    axis.set_title(title, fontsize=11)
    axis.set_xlabel("step")
    axis.grid(alpha=0.3)
    for color, (label, name) in enumerate(series.items()):
        for style, (run_name, rows) in zip(cycle(_LINE_STYLES), runs.items()):
            points = _points(rows, name)
            if points:
                # Earlier series are wider, so that they show where a later one covers them.
                axis.plot(
                    *zip(*points, strict=True),
                    style,
                    color=f"C{color}",
                    label=describe(run_name, label),
                    linewidth=1.2 + 0.9 * (len(series) - 1 - color),
                )
    if title == "Reward":
        names = {name for rows in runs.values() for row in rows for name in row}
        scores = [n for n in names if n.startswith("eval/") and n.endswith("/avg_at_k")]
        for color, name in enumerate(sorted(scores), start=1):
            for marker, (run_name, rows) in zip(cycle("osD^v"), runs.items()):
                points = _points(rows, name)
                if points:
                    text = describe(run_name, name)
                    axis.plot(*zip(*points, strict=True), marker, color=f"C{color}", label=text)
    if axis.has_data():
        axis.legend(fontsize=8)


def _points(rows: list[dict[str, float]], name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in rows if name in row]


def _load(run_dir: Path) -> list[dict[str, float]]:
    path = run_dir / "metrics.jsonl"
    if not os.path.lexists(path):
        raise ValueError(f"{path}: no such file; give the directory of a run")
    rows = read_metrics(path)
    if not rows:
        raise ValueError(f"{path}: no step was recorded yet; wait for the first one")
    return rows
