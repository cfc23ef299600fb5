"""The border between the trainer's rank 0 and whatever provides its batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing import Any

    from bapo_megatron.calls import Caller
    from bapo_megatron.types import EncodedBatch, EvalResult


class RolloutSource(Protocol):
    """Provides batches and evaluations; lives on rank 0 only.

    Implementations: ``collector_client.CollectorClient`` (a collector process and real servers) and
    ``replay.ReplaySource`` (dumps of an earlier run, without servers).
    """

    @property
    def weights(self) -> Caller | None:
        """Answers the calls of ``weight_sync.messages``; None where there are no servers."""
        ...

    def wait_ready(self) -> None:
        """Wait until batches can be asked for; weights may still have to be pushed.

        Raises:
            RolloutError: A data row is unreadable, or a server cannot be used.
        """
        ...

    def release_memory(self) -> None:
        """Have servers on the trainer's GPUs give their memory away until weights are pushed."""
        ...

    def collect(self, step: int) -> EncodedBatch | None:
        """Return the batch of ``step`` (0, 1, …) as it was written; blocks until it is complete.

        None means that no server holds the newest weights any more: push them, then ask again.
        """
        ...

    def evaluate(self, step: int) -> list[EvalResult] | None:
        """Score every configured evaluation set with the weights the servers hold.

        None means that no server holds them any more: push them, then ask again.
        """
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


def first_cause(error: BaseException) -> BaseException:
    """The first error of nested task groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
