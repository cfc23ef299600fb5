"""Where metrics go: ``metrics.jsonl`` always; terminal, TensorBoard, Weights & Biases if asked."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from bapo_megatron.config.schema import LogConfig
from bapo_megatron.runtime.calls import decode_json
from bapo_megatron.runtime.files import atomic_write_text, naming, read_regular
from bapo_megatron.telemetry.console import show
from bapo_megatron.telemetry.metrics import BEFORE_TRAINING, OLD_METRIC_NAMES
from bapo_megatron.telemetry.prometheus import ShowRow
from bapo_megatron.telemetry.trackers import (
    PublicSettings,
    SampleRow,
    TensorBoard,
    WeightsAndBiases,
)
from bapo_megatron.types import StepMetrics

_COLUMNS = (
    ("reward", ("reward/mean",), "{:.3f}"),
    ("share", ("bapo/positive_share",), "{:.3f}"),
    ("low", ("clip/low",), "{:.2f}"),
    ("high", ("clip/high",), "{:.2f}"),
    ("entropy", ("policy/entropy",), "{:.3f}"),
    ("grad", ("policy/grad_norm",), "{:.3f}"),
    ("clipped", ("clip/fraction_high", "clip/fraction_low", "clip/fraction_dual"), "{:.3f}"),
    ("stale", ("rollout/staleness_mean",), "{:.1f}"),
    ("tokens", ("rollout/response_tokens_mean",), "{:.1f}"),
    ("tok/s", ("throughput/generated_tokens_per_s",), "{:.0f}"),
)
"""Heading, metrics and format of each column; a column shows the sum of its metrics."""
_EVALUATION_TIME = "time/evaluation_s"
"""Left out of a step's time, so that steps with an evaluation compare with the others."""

_MAX_VALUE = 1e150
"""Limit of a metric: sums and differences of such stay finite, also where figures make them."""


def _is_kept(value: float) -> bool:
    return abs(value) <= _MAX_VALUE  # NaN is not


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Rows of a ``metrics.jsonl``; ``step`` is the number of finished steps, 0 before training.

    Metrics of earlier versions have their present names (``OLD_METRIC_NAMES``).
    A last line without its end is left out: a kill or a full disk has cut it, or it is being
    written.

    Raises:
        ValueError: A line is not a JSON object of numbers with a step; the message names file, line
            and key.
    """
    content, _, _ = read_regular(path).rpartition(b"\n")
    rows: list[dict[str, float]] = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            row = decode_json(dict[str, float], line)
            if not (row.get("step", -1.0) >= 0 and all(map(_is_kept, row.values()))):
                raise ValueError(
                    f"'step' must be there, and all numbers from -{_MAX_VALUE:g} to {_MAX_VALUE:g}"
                )
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}; remove the line") from error
        rows.append({OLD_METRIC_NAMES.get(name, name): value for name, value in row.items()})
    return rows


class MetricsSinks:
    """Writes every step's metrics to the configured places; rank 0 only."""

    def __init__(
        self,
        run_dir: Path,
        run_name: str,
        config: LogConfig,
        *,
        first_step: int,
        total_steps: int,
        settings: PublicSettings | None = None,
        sample_rows: Callable[[int], Sequence[SampleRow]] = lambda _: (),
        show_row: ShowRow | None = None,
    ) -> None:
        """Open the sinks; drop the rows of ``first_step`` and of what comes after it.

        ``settings`` and ``sample_rows`` are for trackers; ``show_row`` takes every row.
        """
        self._show_row = show_row
        self._total_steps = total_steps
        self._shows = config.console
        self._lines = 0
        path = run_dir / "metrics.jsonl"
        kept = []
        if first_step and path.exists():
            earlier = read_metrics(path)  # its step is made again
            kept = [json.dumps(row) + "\n" for row in earlier if row["step"] < first_step]
        atomic_write_text(path, "".join(kept))
        self._file = path.open("a")
        self._trackers: list[TensorBoard | WeightsAndBiases] = []
        if config.tensorboard:
            self._trackers.append(TensorBoard(run_dir / "tensorboard", first_step, settings or {}))
        if config.wandb_project:
            tracker = WeightsAndBiases(run_dir, run_name, config, settings or {}, sample_rows)
            self._trackers.append(tracker)

    def write(self, metrics: StepMetrics) -> None:
        """Report a step everywhere; flush its JSON line to disk."""
        finite = {k: v for k, v in metrics.values.items() if _is_kept(v)}
        row = {"step": metrics.step, **finite}
        if self._show_row is not None:
            self._show_row(row)
        with naming(Path(self._file.name)):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        if self._shows and metrics.step != BEFORE_TRAINING:
            self._show(metrics)
        for tracker in self._trackers:
            tracker.write(metrics.step, finite)

    def close(self) -> None:
        """Flush and close everything."""
        self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def _show(self, metrics: StepMetrics) -> None:
        """Print one row of the table; the headings come again every 20 rows."""
        values = metrics.values
        cells = [f"{metrics.step:>4}/{self._total_steps}"]
        for heading, names, form in _COLUMNS:
            found = [values[name] for name in names if name in values]
            cells.append(f"{form.format(sum(found)) if found else '-':>{_width(heading)}}")
        step_s = sum(
            v for k, v in values.items() if k.startswith("time/") and k != _EVALUATION_TIME
        )
        cells.append(f"{step_s:6.{2 if step_s < 10 else 1}f} s")  # a replay takes milliseconds
        if self._lines % 20 == 0:
            blank = " " * (len(cells[0]) - 4)
            heads = "  ".join(f"{heading:>{_width(heading)}}" for heading, _, _ in _COLUMNS)
            show(f"step{blank}  {heads}      time", style="bold")
        show("  ".join(cells))
        self._lines += 1


def _width(heading: str) -> int:
    return max(6, len(heading))
