"""Which checkpoint is the best one by ``checkpoint.best``; ``policy.checkpoint_files`` keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bapo_megatron.distributed import broadcast_bytes
from bapo_megatron.policy.checkpoint_files import (
    BEST_NAME,
    BestCheckpoint,
    find_best,
    is_there,
    name_best,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from bapo_megatron.distributed import ProcessGroups
    from bapo_megatron.trainer.resume import Progress


def take_best(
    progress: Progress, metric: str, evaluated: Mapping[str, float], groups: ProcessGroups
) -> bool:
    """Note the checkpoint of ``progress.next_step`` as the best one, if it is.

    A collective over all ranks; call it after every evaluation. The first of equal ones stays.

    Args:
        progress: Holds the best one so far, on rank 0.
        metric: ``checkpoint.best``.
        evaluated: The evaluation's metrics, on rank 0.
        groups: This rank's groups.

    Returns:
        Whether it is, on every rank: then it must be saved.
    """
    answer: bytes | None = None
    if groups.rank == 0:
        best, value = progress.best, evaluated.get(metric)
        # The value of another metric, from before a resume, compares with nothing.
        known = best.value if best is not None and best.metric == metric else None
        is_best = value is not None and (known is None or value > known)
        if is_best:
            assert value is not None
            progress.best = BestCheckpoint(f"step_{progress.next_step}", metric, value)
        answer = b"1" if is_best else b"0"
    return broadcast_bytes(answer, groups) == b"1"


def restore_best(root: Path, progress: Progress) -> None:
    """Let ``best`` name what the resumed checkpoint knows as the best one; rank 0 only.

    They differ after a kill between the two files, and where a run goes on from an older
    checkpoint: what was better later belongs to the try that was abandoned.

    Args:
        root: Directory of the run's checkpoints.
        progress: As it was loaded; ``best`` is none afterwards where its directory is gone.
    """
    if progress.best is not None and not is_there(root, progress.best.step):
        progress.best = None
    if progress.best is None:
        named = find_best(root)
        if named is not None and named.step > progress.next_step:
            (root / BEST_NAME).unlink()
    elif find_best(root) != progress.best:
        name_best(root, progress.best)
