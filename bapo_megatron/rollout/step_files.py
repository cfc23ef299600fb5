"""The files of a step; they are written in a thread, while requests go on."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, ParamSpec

from bapo_megatron.data.dump import write_batch, write_texts
from bapo_megatron.errors import RolloutError
from bapo_megatron.files import atomic_write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from bapo_megatron.types import RolloutBatch, SampleText

_P = ParamSpec("_P")


async def write_samples(
    path: Path, batch: RolloutBatch, texts: Sequence[SampleText] | None
) -> None:
    """Write a batch whose samples nobody changes meanwhile.

    Args:
        path: Where the trainer reads the batch.
        batch: The batch.
        texts: What is written beside it for people, if anything. It comes first, so that a dump
            that is there is complete.

    Raises:
        RolloutError: The file cannot be written; nothing is left behind.
        DumpError: The batch is not intact.
    """
    what = f"the samples of step {batch.step}"
    remedy = "rollout.dump=false to keep only the newest batch in the temporary directory"
    with _named(what, path, remedy):
        if texts is not None:
            await _in_thread(write_texts, path, batch.step, texts)
        await _in_thread(write_batch, path, batch)


async def write_timeline(path: Path, step: int, content: str) -> None:
    """Write what ``Timeline.render`` returned.

    Raises:
        RolloutError: The file cannot be written.
    """
    with _named(f"the timeline of step {step}", path, "rollout.timeline=false"):
        await _in_thread(atomic_write_text, path, content)


@contextlib.contextmanager
def _named(what: str, path: Path, remedy: str) -> Iterator[None]:
    """Say what could not be written, where, and which setting does without it."""
    try:
        yield
    except OSError as error:
        raise RolloutError(
            f"cannot write {what} to {path}: {error.strerror}; free space, or set {remedy}"
        ) from error


async def _in_thread(write: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
    """Run ``write`` in a thread; whoever is cancelled waits until it has ended.

    Else it would write into the temporary directory that is just being removed.
    """
    writing = asyncio.ensure_future(asyncio.to_thread(write, *args, **kwargs))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        raise
