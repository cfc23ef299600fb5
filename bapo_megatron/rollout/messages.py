"""The interface between the trainer's rank 0 and the source of its batches.

The trainer uses a ``RolloutSource``. The records and calls below it are those that
``client.CollectorClient`` sends to ``collector.Collector`` in another process, one at a time; the
calls of a weight sync are in ``weight_sync.receive``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.runtime.calls import Call, Caller
from bapo_megatron.types import EncodedBatch, EvalResult


class RolloutSource(Protocol):
    """Provides batches and evaluations on rank 0: from a collector, or from dumps."""

    @property
    def weights(self) -> Caller | None:
        """Starts the calls of ``weight_sync.receive``; None where there are no servers."""

    def wait_ready(self) -> None:
        """Wait until batches can be asked for; a weight sync may still have to come first.

        This call, ``release_memory`` and ``restore`` raise ``StoppedError`` if the run is to stop;
        then only ``close`` may follow.
        """

    def release_memory(self) -> None:
        """Make servers on the trainer's GPUs release their memory until the next weight sync."""

    def collect(self, step: int) -> EncodedBatch | None:
        """Return the encoded batch of ``step`` (1, 2, …); block until it is complete.

        Returns None if no server holds the newest weights any more: sync them and call again. Also
        if the run is to stop: ``save`` keeps what was sampled.
        """

    def evaluate(self, step: int, *, resume: bool) -> list[EvalResult] | None:
        """Score every configured evaluation set with the weights the servers hold.

        Returns None as ``collect`` does. ``resume``: continue with the samples of an earlier
        process, which had the same weights.
        """

    def begin_evaluation(self, step: int) -> None:
        """Begin an evaluation beside the next batch.

        Call ``evaluate`` before the next weight sync; if it returns None, the results are lost.
        """

    def save(self, path: Path) -> Callable[[], None]:
        """Start writing data position and unfinished samples, as they are now, for a checkpoint.

        The returned function waits for the end, and raises ``OSError`` if the file cannot be
        written. A source without such a state writes nothing.
        """

    def restore(self, path: Path) -> None:
        """Continue from what ``save`` wrote."""

    def close(self) -> None:
        """End every process that the source started; safe to call twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Start the run's own servers, if any, and load tokenizer and prompts."""

    config: RunConfig
    for_training: bool
    """Whether batches will be asked for, or evaluations only."""
    awaits_weights: bool
    """Whether a weight sync comes before every other call but ``restore``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Score the evaluation sets."""

    moment: str
    """Prefix of the results files, such as ``step_000020`` (``evaluation.samples_file``)."""
    weights: str
    """Name of the weights; samples of other weights are not continued."""
    resume: bool
    """Continue with the samples of an earlier process."""


OPEN = Call("open", Open, None)
CONNECT = Call("connect", None, None)
"""Connect to enough servers; each is checked before it is used."""
RELEASE_MEMORY = Call("release_memory", None, None)
COLLECT = Call("collect", int, Path | None)
"""Collect the batch of a step into a file; None as ``RolloutSource.collect``."""
EVALUATE = Call("evaluate", Evaluate, list[EvalResult] | None)
BEGIN_EVALUATION = Call("begin_evaluation", Evaluate, None)
INTERRUPT = Call("interrupt", None, None)
"""End ``COLLECT`` or ``EVALUATE`` at once, as if no server held the weights; has no response."""
SAVE = Call("save", Path, None)
SAVED = Call("saved", None, str)
"""Wait for the write that ``SAVE`` started; returns its error, empty if there is none."""
RESTORE = Call("restore", Path, None)
