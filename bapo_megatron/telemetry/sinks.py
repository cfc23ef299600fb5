"""Sinks of metrics: ``metrics.jsonl``, and if configured terminal, Prometheus and trackers."""

import json
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast

from prometheus_client import CollectorRegistry, Gauge, start_http_server
from pydantic import Field

from bapo_megatron.config.schema import LogConfig
from bapo_megatron.runtime.calls import decode_lines
from bapo_megatron.runtime.files import atomic_write_text, naming, read_regular
from bapo_megatron.telemetry.console import say, show
from bapo_megatron.telemetry.metrics import BEFORE_TRAINING, OLD_METRIC_NAMES
from bapo_megatron.types import StepMetrics

ShowRow = Callable[[Mapping[str, float]], None]
"""Takes a row of ``metrics.jsonl``."""

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
"""Heading, metrics and format of each column, which shows the sum of its metrics."""
_OF_DEMONSTRATIONS = (
    ("epoch", ("demonstrations/epoch",), "{:.2f}"),
    ("loss", ("loss/policy",), "{:.4f}"),
    *(column for column in _COLUMNS if column[0] in ("entropy", "grad")),
    ("tok/s", ("throughput/trained_tokens_per_s",), "{:.0f}"),
)
"""Columns of a run without responses of its own."""
_EVALUATION_TIME = "time/evaluation_s"
"""Excluded from a step's time, so that steps with and without an evaluation compare."""

_MAX_VALUE = 1e150
"""Limit of a metric, so that sums and differences stay finite, also in figures."""
_Metric = Annotated[int | float, Field(ge=-_MAX_VALUE, le=_MAX_VALUE)]
"""Integers stay integers when a resumed run rewrites rows."""


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the rows of a ``metrics.jsonl``; ``step`` counts finished steps, 0 before training.

    Metrics of earlier versions get their current names (``OLD_METRIC_NAMES``). An incomplete last
    line is skipped: it was cut by a kill or a full disk, or is being written.

    Raises:
        ValueError: A line is not a JSON object of numbers with a step; the message names file, line
            and key.
    """
    content, _, _ = read_regular(path).rpartition(b"\n")
    rows = decode_lines(dict[str, _Metric], content, path)
    for number, row in enumerate(rows, start=1):
        if row.get("step", -1.0) < 0:
            raise ValueError(f"{path}:{number}: 'step' must be there, from 0 on; remove the line")
    return [{OLD_METRIC_NAMES.get(name, name): row[name] for name in row} for row in rows]


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
        settings: Mapping[str, Any] | None = None,
        sample_rows: Callable[[int], Sequence[Mapping[str, Any]]] = lambda _: (),
        show_row: ShowRow | None = None,
    ) -> None:
        """Open the sinks; drop rows from ``first_step`` on, which the run will repeat.

        ``settings`` and ``sample_rows`` are for trackers; ``show_row`` takes every row.
        """
        self._show_row, self._total_steps = show_row, total_steps
        self._shows, self._num_lines = config.console, 0
        path = run_dir / "metrics.jsonl"
        kept = []
        if first_step and path.exists():
            rows = read_metrics(path)
            kept = [json.dumps(row) + "\n" for row in rows if row["step"] < first_step]
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
        finite = {k: v for k, v in metrics.values.items() if abs(v) <= _MAX_VALUE}  # no NaN
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
        """Print one row of the table, with headings every 20 rows."""
        values = metrics.values
        columns = _COLUMNS if "reward/mean" in values else _OF_DEMONSTRATIONS
        cells = [f"{metrics.step:>4}/{self._total_steps}"]
        for _, names, form in columns:
            parts = [values[name] for name in names if name in values]
            cells.append(f"{form.format(sum(parts)) if parts else '-':>7}")
        step_s = sum(
            v for k, v in values.items() if k.startswith("time/") and k != _EVALUATION_TIME
        )
        cells.append(f"{step_s:6.{2 if step_s < 10 else 1}f} s")  # a replay takes milliseconds
        if self._num_lines % 20 == 0:
            blank = " " * (len(cells[0]) - 4)
            heads = "  ".join(f"{heading:>7}" for heading, _, _ in columns)
            show(f"step{blank}  {heads}      time", style="bold")
        show("  ".join(cells))
        self._num_lines += 1


class TensorBoard:
    """Event files of a run."""

    def __init__(self, directory: Path, first_step: int, settings: Mapping[str, Any]) -> None:
        """Open the file; hide what an earlier start wrote from ``first_step`` on.

        ``settings`` are the run's hyperparameters; TensorBoard shows those of the first start, with
        the last value of each curve as a metric.
        """
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(directory), purge_step=first_step)
        self._file = cast("Any", writer.file_writer)
        if settings:
            self._file.add_summary(hparams_pb(dict(settings)))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to every curve."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all, because every event wakes the writer thread.
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._file.add_summary(Summary(value=points), step)

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()


class WeightsAndBiases:
    """The run at Weights & Biases; a resumed run continues under the same id."""

    def __init__(
        self,
        run_dir: Path,
        run_name: str,
        config: LogConfig,
        settings: Mapping[str, Any],
        sample_rows: Callable[[int], Sequence[Mapping[str, Any]]],
    ) -> None:
        """Begin or continue it; ``sample_rows`` returns samples of a step, cells by column."""
        import wandb

        self._make_table = wandb.Table
        self._sample_rows, self._every_steps = sample_rows, config.wandb_samples_every
        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            atomic_write_text(id_file, uuid.uuid4().hex)
        self._run: Any = wandb.init(
            project=config.wandb_project,
            name=run_name,
            group=config.wandb_group or None,
            tags=config.wandb_tags,
            dir=str(run_dir),
            id=id_file.read_text(),
            resume="allow",
            config=dict(settings),
            allow_val_change=True,  # a resumed run may have other settings
            settings=wandb.Settings(
                # The command line and the repository's URL may hold secrets.
                x_disable_meta=True,
                disable_git=True,
                save_code=False,
                quiet=True,  # else a run ends with thirty lines of its metrics
            ),
        )
        # Not W&B's own step, which only grows: steps are repeated after a crash.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to every curve and, where it is due, a table of samples."""
        logged: dict[str, Any] = dict(values)
        is_due = self._every_steps and step != BEFORE_TRAINING and not step % self._every_steps
        if is_due and (rows := self._rows(step)):
            cells = [list(row.values()) for row in rows]
            logged["samples"] = self._make_table(columns=list(rows[0]), data=cells)
        self._run.log({"step": step, **logged})

    def _rows(self, step: int) -> Sequence[Mapping[str, Any]]:
        """Return samples of a step; after a read error, never any again."""
        try:
            return self._sample_rows(step)
        except (ValueError, OSError) as error:
            self._sample_rows = lambda _: ()
            say(f"no table of samples for Weights & Biases from now on: {error}")
            return ()

    def close(self) -> None:
        """Send remaining data, and end the run."""
        self._run.finish()


@contextmanager
def rows_served(config: LogConfig) -> Iterator[ShowRow]:
    """Serve metrics to Prometheus within the block, if ``prometheus_port`` is set.

    Yields the function that takes rows. ``a/b`` is the gauge ``bapo_a_b``: every character that
    Prometheus does not allow becomes ``_``. A gauge keeps its last value, such as an evaluation's.

    Raises:
        ValueError: The port is in use.
    """
    registry, gauges = CollectorRegistry(), dict[str, Gauge]()

    def show_row(row: Mapping[str, float]) -> None:
        for name, value in row.items():
            key = "bapo_" + re.sub("[^a-zA-Z0-9_]", "_", name)
            if key not in gauges:
                gauges[key] = Gauge(key, name, registry=registry)
            gauges[key].set(value)

    if not config.prometheus_port:
        yield show_row
        return
    host, port = config.prometheus_host, config.prometheus_port
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ValueError(
            f"log.prometheus_port: cannot listen on {host}:{port} ({error.strerror}); end what "
            "uses it, or choose another port (or log.prometheus_host)"
        ) from error
    try:
        yield show_row
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
