"""Which checkpoint ``resume`` continues from, and what a message says of it.

Neither this module nor what it imports may import torch: the command begins with it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bapo_megatron.config.settings import read_settings
from bapo_megatron.errors import describe_os_error
from bapo_megatron.policy.checkpoint_files import (
    LATEST_NAME,
    CheckpointError,
    DamagedError,
    check_complete,
    damage_of,
    find_checkpoint,
    find_latest,
    find_steps,
    first_complete,
    holds_checkpoints,
    lack_of,
    step_name,
)
from bapo_megatron.telemetry.sinks import read_metrics
from bapo_megatron.telemetry.starts import read_starts

_REMEDY = "restore one from a copy, or change run_dir"
_MAX_NAMED = 3
"""Incomplete checkpoints that a message names, the newest ones."""


@contextmanager
def as_checkpoint_error() -> Iterator[None]:
    """Raise what is wrong with a file as a ``CheckpointError``, which ranks raise together."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {describe_os_error(error)}") from error
    except ValueError as error:
        raise CheckpointError(str(error)) from error


@as_checkpoint_error()
def choose_checkpoint(run_dir: Path, *, verify: bool = True) -> tuple[Path | None, str]:
    """Return the checkpoint to continue from, and what to say where ``latest`` does not name it.

    None stands for the beginning: no checkpoint was saved yet. Nothing is changed. ``verify``: see
    ``check_complete``.

    Raises:
        CheckpointError: The one that ``latest`` names is damaged; or there is none that is complete
            though there was one. The message says how to go on.
    """
    root = run_dir / "checkpoints"
    try:
        latest = find_latest(root)
        problem = f"{root / LATEST_NAME}: missing"
    except DamagedError as error:
        latest, problem = None, str(error)
    if latest is not None:
        with damage_of(latest):
            check_complete(latest, verify=verify)
        return latest, ""
    steps = find_steps(root)[::-1]
    newest = first_complete(root, steps)
    if newest is not None:
        name = step_name(newest)
        return newest, f"{problem}; continuing from {name}, the newest complete checkpoint"
    if holds_checkpoints(root):
        found = [path for n in steps[:_MAX_NAMED] if (path := find_checkpoint(root, n))]
        lacks = ", ".join(f"{step_name(path)} ({lack_of(path)})" for path in found)
        lacks = f"no complete checkpoint: {lacks}" if lacks else "no checkpoint beside it"
        raise CheckpointError(f"{problem}; {lacks}; {_REMEDY}")
    if told := _told_of_save(run_dir):
        raise CheckpointError(f"{root}: no checkpoint, but {told}; {_REMEDY}")
    return None, f"{root}: no checkpoint yet, starting at step 1"


def _told_of_save(run_dir: Path) -> str:
    """Return by what a run must have had a checkpoint; '' where it may have ended before."""
    starts = read_starts(run_dir)
    if starts and starts[-1].step > 0:
        return f"starts.jsonl says that the run continued from step {starts[-1].step}"
    metrics = run_dir / "metrics.jsonl"
    rows = read_metrics(metrics) if metrics.exists() else []
    last_step = max((int(row["step"]) for row in rows), default=0)
    earlier = [read_settings(path) for path in run_dir.glob("config*.yaml")]
    every: list[Any] = [settings.get("checkpoint.every_steps") for settings in earlier]
    # One that is written in the background is complete when the next one begins.
    factor = 1 + any(settings.get("checkpoint.asynchronous") for settings in earlier)
    if every and all(isinstance(n, int) and 0 < factor * n < last_step for n in every):
        return f"metrics.jsonl reaches step {last_step}, and one was saved every {max(every)} steps"
    return ""


def how_to_continue(run_dir: Path) -> str:
    """Return what a message says after the reason for which a run ended."""
    try:
        checkpoint, _ = choose_checkpoint(run_dir)
    except CheckpointError as error:
        return f"; {error}"
    if checkpoint is None:
        return "; no checkpoint yet: the same command with --resume starts at step 1"
    return f"; the same command with --resume continues from {checkpoint}"
