"""The border between the trainer's rank 0 and whatever provides its batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from bapo_megatron.types import EvalResult, RolloutBatch


class RolloutError(RuntimeError):
    """Generation failed and cannot go on; the message is one line that says what to do."""


class RolloutSource(Protocol):
    """Provides batches and evaluations; lives on rank 0 only.

    Implementations: ``collector_client.CollectorClient`` (a collector process and real servers) and
    ``replay.ReplaySource`` (dumps of an earlier run).
    """

    def collect(self, step: int) -> RolloutBatch:
        """Return the batch of ``step`` (0, 1, …); blocks until it is complete."""
        ...

    def sync_weights(self, model_dir: Path, version: int) -> None:
        """Load the Hugging Face weights in ``model_dir`` into every server as ``version``."""
        ...

    def evaluate(self, step: int) -> list[EvalResult]:
        """Score every configured evaluation set with the weights the servers hold."""
        ...

    def state(self) -> dict[str, Any]:
        """Data position and unfinished samples as plain JSON values, for the checkpoint."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what ``state`` returned."""
        ...

    def close(self) -> None:
        """End every process that the source started; safe to call twice."""
        ...
