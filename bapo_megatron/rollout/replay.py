"""The files of a step: written for the trainer, and read again by a replay, without any server."""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bapo_megatron.data.dump import dump_path, read_encoded, write_batch, write_texts
from bapo_megatron.errors import RolloutError
from bapo_megatron.types import EncodedBatch, EvalResult, RolloutBatch, SampleText


async def write_samples(
    path: Path, batch: RolloutBatch, texts: Sequence[SampleText] | None
) -> None:
    """Write a batch whose samples nobody changes meanwhile, in a thread.

    ``texts`` are written beside it for people, and first, so that a dump that is there is complete.

    Raises:
        RolloutError: The file cannot be written; nothing is left behind.
        DumpError: The batch is not intact.
    """
    what = f"the samples of step {batch.step}"
    remedy = "set rollout.dump=false to keep only the newest batch in the temporary directory"
    with write_errors(what, path, remedy):
        if texts is not None:
            await _in_thread(functools.partial(write_texts, path, batch.step, texts))
        await _in_thread(functools.partial(write_batch, path, batch))


def remove_dumps(directory: Path, last_step: int) -> None:
    """Remove the dumps of the steps up to ``last_step``, each before its texts; keep other files.

    What a kill in between leaves is removed by the next call.
    """
    for folder in (directory, directory / "texts"):
        for path in folder.glob("step_*.parquet"):
            step = path.stem.removeprefix("step_")
            if step.isdecimal() and int(step) <= last_step:
                path.unlink()


@contextlib.contextmanager
def write_errors(what: str, path: Path, remedy: str) -> Iterator[None]:
    """Say what the block could not write, where, and how to do without it.

    Raises:
        RolloutError: The operating system refused.
    """
    try:
        yield
    except OSError as error:
        raise RolloutError(
            f"cannot write {what} to {path}: {error.strerror}; free space, or {remedy}"
        ) from error


async def _in_thread(write: Callable[[], None]) -> None:
    """Run ``write`` in a thread; where the caller is cancelled, wait until it has ended.

    Otherwise it would write into the temporary directory that is just being removed.
    """
    writing = asyncio.ensure_future(asyncio.to_thread(write))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        raise


@dataclass(frozen=True)
class ReplaySource:
    """A ``RolloutSource`` that reads the dumps in ``<run_dir>/rollouts`` of an earlier run."""

    directory: Path

    @property
    def weights(self) -> None:
        """None: there is no server to push them to."""
        return None

    def wait_ready(self) -> None:
        """Nothing was started."""

    def release_memory(self) -> None:
        """Nothing holds any."""

    def collect(self, step: int) -> EncodedBatch:
        """Read the dump of ``step``, which is checked where it is decoded.

        Raises:
            RolloutError: There is none.
        """
        path = dump_path(self.directory, step)
        if not path.is_file():
            present = sorted(self.directory.glob("step_*.parquet"))
            found = f"from {present[0].name} to {present[-1].name}" if present else "none"
            raise RolloutError(
                f"{path}: no dump of this step (found: {found}); set train.steps to the number of "
                "dumps, or copy the missing file"
            )
        return read_encoded(path)

    def begin_evaluation(self, step: int) -> None:
        """Nothing: there is no server."""

    def evaluate(self, step: int, *, resume: bool = False) -> list[EvalResult]:
        """Nothing: there is no server."""
        return []

    def save(self, path: Path) -> Callable[[], None]:
        """Write nothing: the trainer asks for each step by its number."""
        return lambda: None

    def restore(self, path: Path) -> None:
        """Nothing to restore, whatever kind of run wrote the checkpoint."""

    def close(self) -> None:
        """Nothing was started."""
