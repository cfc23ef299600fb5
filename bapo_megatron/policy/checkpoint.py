"""Checkpoints that are complete or absent, and that load into any layout.

    <root>/step_<n>/    weights and optimizer (Megatron's torch_dist), state.json, rng_<rank>.pt
    <root>/latest       name of the newest complete checkpoint

A checkpoint is written under a temporary name, flushed, and renamed; only then ``latest`` moves. A
kill at any moment leaves the previous checkpoint in place.
"""

from __future__ import annotations

import io
import json
import queue
import random
import re
import shutil
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from bapo_megatron.distributed import fail_together
from bapo_megatron.files import atomic_write_bytes, atomic_write_text, publish_directory
from bapo_megatron.policy.optimizer import finish_load

if TYPE_CHECKING:
    from pathlib import Path

    from bapo_megatron.distributed import ProcessGroups
    from bapo_megatron.policy.megatron_policy import MegatronPolicy

FORMAT = 1
LATEST_NAME = "latest"
STATE_NAME = "state.json"
STEP_PATTERN = re.compile(r"step_(\d+)")

METADATA = {
    # Megatron's default cannot be loaded into another layout.
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


LOAD_ERRORS = (
    CheckpointException,  # torch's, a BaseException
    CheckpointingException,  # Megatron's
    RuntimeError,
    OSError,
    ValueError,
    KeyError,
)


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged or of another model; the message says what to do."""


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """What state.json holds."""

    num_updates: int
    """Optimizer updates made; the schedule follows from it."""
    tensor_size: int
    world_size: int
    file_bytes: dict[str, int]
    """Size of every other file of the checkpoint."""
    extra: dict[str, Any]
    """The caller's own state, plain JSON values."""
    format: int = FORMAT


def save_checkpoint(
    root: Path, step: int, policy: MegatronPolicy, extra: dict[str, Any], keep_last: int
) -> Path:
    """Save everything that training continues from; a collective over all ranks.

    Args:
        root: Directory of all checkpoints of the run.
        step: Number of the checkpoint; one of the same number is replaced.
        policy: The policy.
        extra: State of the caller; only rank 0's is written.
        keep_last: How many checkpoints stay, this one included. Older ones are removed, and so are
            those of higher steps: the try that wrote them was abandoned for this one.

    Returns:
        The checkpoint's directory.

    Raises:
        OSError: It cannot be written; older checkpoints are untouched.
    """
    groups = policy.groups
    directory = root / f"step_{step}"
    temporary = root / f".step_{step}.tmp"
    with fail_together(groups):
        if groups.rank == 0:
            _remove_unfinished(root)
            temporary.mkdir(parents=True)
    with fail_together(groups):
        # Megatron would pass results through a manager process, so that saving may go on in the
        # background. That process outlives a killed trainer; ours saves in the foreground.
        filesystem_async._results_queue = queue.Queue()
        try:
            dist_checkpointing.save(_sharded_state(policy, is_loading=False), str(temporary))
        except (CheckpointException, CheckpointingException, RuntimeError) as error:
            raise OSError(f"cannot write {directory}: {_reason(error)}") from error
        rng = io.BytesIO()
        torch.save(_rng_state(groups), rng)
        atomic_write_bytes(temporary / _rng_name(groups), rng.getvalue())
    with fail_together(groups):
        if groups.rank == 0:
            state = CheckpointState(
                num_updates=policy.num_updates,
                tensor_size=groups.tensor_size,
                world_size=groups.world_size,
                file_bytes=_file_bytes(temporary),
                extra=extra,
            )
            atomic_write_text(temporary / STATE_NAME, json.dumps(asdict(state), indent=2) + "\n")
            publish_directory(temporary, directory)
            atomic_write_text(root / LATEST_NAME, directory.name + "\n")
            _remove_others(root, step, keep_last)
    return directory


def find_latest(root: Path) -> Path | None:
    """Return the newest complete checkpoint under ``root``, or None where none was saved.

    Raises:
        CheckpointError: ``latest`` names a checkpoint that is not there.
    """
    pointer = root / LATEST_NAME
    if not pointer.is_file():
        return None
    name = pointer.read_text(encoding="utf-8").strip()
    directory = root / name
    if not STEP_PATTERN.fullmatch(name) or not directory.is_dir():
        raise CheckpointError(
            f"{pointer}: names {name!r}, which is not a checkpoint beside it; write the name of "
            "one that is (step_<n>) into it, or delete it to start anew"
        )
    return directory


def load_checkpoint(directory: Path, policy: MegatronPolicy) -> dict[str, Any]:
    """Continue from a checkpoint, written by this layout or another; a collective over all ranks.

    Random states are restored where the layout is the one that saved them; in another layout each
    rank keeps the streams that its seed gave it.

    Returns:
        The ``extra`` that was saved.

    Raises:
        CheckpointError: The checkpoint is incomplete, damaged or of another model.
    """
    groups = policy.groups
    state = _read_state(directory)
    _check_files(directory, state)
    try:
        loaded = dist_checkpointing.load(_sharded_state(policy, is_loading=True), str(directory))
    except LOAD_ERRORS as error:
        raise CheckpointError(
            f"{directory}: cannot be loaded into this model ({_reason(error)}); resume with "
            "the model that saved it, or from another checkpoint"
        ) from error
    policy.gpt.load_state_dict(loaded["model"])
    policy.optimizer.load_state_dict(loaded["optimizer"])
    finish_load(policy.optimizer)
    policy.num_updates = state.num_updates
    if (state.tensor_size, state.world_size) == (groups.tensor_size, groups.world_size):
        _restore_rng(torch.load(directory / _rng_name(groups), weights_only=True))
    return state.extra


def _sharded_state(policy: MegatronPolicy, *, is_loading: bool) -> dict[str, Any]:
    metadata = dict(METADATA)  # Megatron writes process groups into it
    model = policy.gpt.sharded_state_dict(metadata=metadata)
    optimizer = policy.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


def _read_state(directory: Path) -> CheckpointState:
    path = directory / STATE_NAME
    if not path.is_file():
        raise CheckpointError(f"{directory}: not a complete checkpoint, {STATE_NAME} is missing")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        state = CheckpointState(**fields)
    except (UnicodeDecodeError, json.JSONDecodeError, TypeError) as error:
        raise CheckpointError(
            f"{path}: damaged ({error}); resume from another checkpoint"
        ) from error
    if state.format != FORMAT:
        raise CheckpointError(
            f"{path}: format {state.format}, this version reads format {FORMAT}; resume with the "
            "version that saved it"
        )
    return state


def _check_files(directory: Path, state: CheckpointState) -> None:
    """Refuse missing and truncated files here, with their names, on every rank alike."""
    found = _file_bytes(directory)
    for name, num_bytes in state.file_bytes.items():
        if found.get(name) != num_bytes:
            actual = f"has {found[name]} bytes" if name in found else "is missing"
            raise CheckpointError(
                f"{directory}: damaged, {name} {actual} instead of {num_bytes} bytes; resume from "
                "another checkpoint"
            )


def _file_bytes(directory: Path) -> dict[str, int]:
    return {
        str(path.relative_to(directory)): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != STATE_NAME
    }


def _rng_name(groups: ProcessGroups) -> str:
    return f"rng_{groups.rank}.pt"


def _rng_state(groups: ProcessGroups) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "torch": torch.get_rng_state(),
        "megatron": get_cuda_rng_tracker().get_states(),
    }
    if groups.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(groups.device)
    return state


def _restore_rng(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["megatron"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _remove_unfinished(root: Path) -> None:
    """Remove what killed saves and removals left."""
    for path in root.glob(".step_*.tmp"):
        shutil.rmtree(path)


def _remove_others(root: Path, saved_step: int, keep_last: int) -> None:
    steps = [
        int(match[1]) for path in root.iterdir() if (match := STEP_PATTERN.fullmatch(path.name))
    ]
    kept = sorted(step for step in steps if step <= saved_step)[-keep_last:]
    for step in set(steps).difference(kept):
        # Renamed first: a kill in the middle must not leave half a checkpoint under a valid name.
        removed = root / f".step_{step}.tmp"
        (root / f"step_{step}").rename(removed)
        shutil.rmtree(removed)


def _reason(error: BaseException) -> str:
    """Return the first line of what went wrong on the first rank where something did."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return (str(error).strip() or type(error).__name__).splitlines()[0]
