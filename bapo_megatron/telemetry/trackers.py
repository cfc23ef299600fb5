"""TensorBoard and Weights & Biases: curves, the settings that runs are compared by, and samples."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bapo_megatron.config.schema import LogConfig
from bapo_megatron.runtime.files import atomic_write_text
from bapo_megatron.telemetry.console import say
from bapo_megatron.telemetry.metrics import BEFORE_TRAINING

PublicSettings = Mapping[str, bool | int | float | str]
"""A run's settings by dotted key, without secrets (``config.settings.public_settings``)."""

_SETTINGS_SUFFIX = ".settings"


class SampleRow(NamedTuple):
    """A row of a table of samples; the columns in their order."""

    step: int
    group: int
    sample: int
    reward: float
    tokens: int
    finish: str
    prompt: str
    response: str
    answer: str


class TensorBoard:
    """Event files of a run."""

    def __init__(self, directory: Path, first_step: int, settings: PublicSettings) -> None:
        """Open them; what an earlier start wrote from ``first_step`` on is no longer shown.

        ``settings`` are the hyper-parameters of the run, and the last value of every curve is one
        of its metrics.
        """
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard takes the first settings that it finds in a directory, so they have a file of
        # their own. It reads files in the order of their names and none again: this comes first.
        for path in directory.glob(f"*{_SETTINGS_SUFFIX}"):
            path.unlink()
        if settings:
            from tensorboard.plugins.hparams.summary_v2 import hparams_pb

            writer: Any = SummaryWriter(str(directory), filename_suffix=_SETTINGS_SUFFIX)
            writer.file_writer.add_summary(hparams_pb(dict(settings)))
            writer.close()
        self._writer: Any = SummaryWriter(str(directory), purge_step=first_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to every curve."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all: each of its own wakes the thread that writes them.
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.file_writer.add_summary(Summary(value=points), step)

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


class WeightsAndBiases:
    """The run at Weights & Biases; a resumed run goes on under the same id."""

    def __init__(
        self,
        run_dir: Path,
        run_name: str,
        config: LogConfig,
        settings: PublicSettings,
        sample_rows: Callable[[int], Sequence[SampleRow]],
    ) -> None:
        """Begin or continue it; ``sample_rows`` returns samples of a step."""
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
                # Command line and address of the working directory's repository may hold secrets.
                x_disable_meta=True,
                disable_git=True,
                save_code=False,
                quiet=True,  # else the end of a run is thirty lines of its numbers
            ),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to every curve and, where it is due, a table of samples."""
        logged: dict[str, Any] = dict(values)
        is_due = self._every_steps and step != BEFORE_TRAINING and not step % self._every_steps
        if is_due and (rows := self._rows(step)):
            columns, cells = list(SampleRow._fields), [list(row) for row in rows]
            logged["samples"] = self._make_table(columns=columns, data=cells)
        self._run.log(logged, step=step)

    def _rows(self, step: int) -> Sequence[SampleRow]:
        """Return samples of a step; none any more once they cannot be read, which ends no run."""
        try:
            return self._sample_rows(step)
        except (ValueError, OSError) as error:
            self._sample_rows = lambda _: ()
            say(f"no table of samples at Weights & Biases from now on: {error}")
            return ()

    def close(self) -> None:
        """Send what is left, and end the run."""
        self._run.finish()
