"""Which checkpoint ``resume`` continues from, and what a message says of it.

Neither this module nor what it imports may import torch: the command begins with it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
    step_name,
    why_incomplete,
)
from bapo_megatron.runtime.calls import shown_value
from bapo_megatron.runtime.files import atomic_write_text, read_regular
from bapo_megatron.telemetry.starts import read_starts

SAVED_NAME = "saved"
"""File of a run directory: the newest checkpoint's name, which outlives ``checkpoints/``."""
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
def choose_checkpoint(run_dir: Path, *, checks_latest: bool = True) -> tuple[Path | None, str]:
    """Return the checkpoint to continue from, and what to say where ``latest`` does not name it.

    None stands for the beginning: no checkpoint was saved yet. Nothing is changed. Without
    ``checks_latest`` the one that ``latest`` names may be damaged: ``load_checkpoint`` says the
    same of it.

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
        if checks_latest:
            with damage_of(latest):
                check_complete(latest)
        return latest, ""
    steps = find_steps(root)[::-1]
    newest = first_complete(root, steps)
    if newest is not None:
        name = step_name(newest)
        return newest, f"{problem}; continuing from {name}, the newest complete checkpoint"
    if holds_checkpoints(root):
        incomplete = [path for n in steps[:_MAX_NAMED] if (path := find_checkpoint(root, n))]
        reasons = ", ".join(f"{step_name(path)} ({why_incomplete(path)})" for path in incomplete)
        lack = f"no complete checkpoint: {reasons}" if reasons else "no checkpoint beside it"
        raise CheckpointError(f"{problem}; {lack}; {_REMEDY}")
    if evidence := evidence_of_save(run_dir):
        raise CheckpointError(f"{root}: no checkpoint, but {evidence}; {_REMEDY}")
    return None, f"{root}: no checkpoint yet, starting at step 1"


def note_save(run_dir: Path, checkpoint: Path) -> None:
    """Write ``saved``, once a checkpoint is complete."""
    atomic_write_text(run_dir / SAVED_NAME, f"{checkpoint.name}\n")


def evidence_of_save(run_dir: Path) -> str:
    """Return what shows that a run has saved or finished; '' if it may have ended before that.

    Raises:
        ValueError: ``starts.jsonl`` is damaged.
        OSError: A file cannot be read.
    """
    saved = run_dir / SAVED_NAME
    if saved.exists():
        name = read_regular(saved).decode(errors="replace").strip()
        return f"{saved} names {shown_value(name)}"
    last_step = max((start.step for start in read_starts(run_dir)), default=0)
    if last_step > 0:
        return f"starts.jsonl says that the run continued from step {last_step}"
    if (run_dir / "summary.json").exists():
        return "summary.json says that the run finished"
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
