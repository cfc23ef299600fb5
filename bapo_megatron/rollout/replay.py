"""Batches from the dumps of an earlier run, without any server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bapo_megatron.data.dump import read_encoded, step_of
from bapo_megatron.errors import RolloutError

if TYPE_CHECKING:
    from pathlib import Path

    from bapo_megatron.types import EncodedBatch, EvalResult


class ReplaySource:
    """A ``RolloutSource`` that reads ``<dir>/step_<n>.parquet``; the step alone is its position."""

    def __init__(self, directory: Path) -> None:
        """Keep the directory.

        Args:
            directory: ``<run_dir>/rollouts`` of a run.
        """
        self._directory = directory

    @property
    def weights(self) -> None:
        """None: there is no server to push them to."""
        return None

    def wait_ready(self) -> None:
        """Nothing was started."""

    def release_memory(self) -> None:
        """Nothing holds any."""

    def collect(self, step: int) -> EncodedBatch:
        """Read the dump of ``step``; its samples are checked where it is decoded.

        Raises:
            RolloutError: There is none, or it belongs to another step.
            DumpError: It is cut short, or no dump of this format.
        """
        path = self._directory / f"step_{step:06d}.parquet"
        if not path.is_file():
            present = sorted(self._directory.glob("step_*.parquet"))
            found = f"from {present[0].name} to {present[-1].name}" if present else "none"
            raise RolloutError(
                f"{path}: no dump of this step (found: {found}); set train.steps to the number of "
                "dumps, or copy the missing file"
            )
        batch = read_encoded(path)
        if (own_step := step_of(batch)) != step:
            raise RolloutError(
                f"{path}: holds step {own_step}, not {step}; give the file its name back"
            )
        return batch

    def evaluate(self, step: int) -> list[EvalResult]:
        """No server, no evaluation."""
        return []

    def state(self) -> dict[str, Any]:
        """Nothing: the trainer asks for each step by its number."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Nothing to restore, whatever kind of run wrote the checkpoint."""

    def close(self) -> None:
        """Nothing was started."""
