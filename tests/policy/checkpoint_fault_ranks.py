"""What the ranks of test_checkpoint_faults.py do: saves that are killed, delayed or fail."""

import errno
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
)

from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.policy.checkpoint import CheckpointSaver, load_checkpoint
from bapo_megatron.policy.checkpoint_files import find_latest
from bapo_megatron.policy.checkpoint_shards import ShardWriter
from bapo_megatron.policy.train_state import TrainState
from bapo_megatron.runtime.distributed import ProcessGroups
from tests.distributed_launch import joined
from tests.policy.checkpoint_damages import WORDS, damage, flip_weight, forget_checksums, limited
from tests.policy.checkpoint_ranks import OPTIMIZER, resume, save, train_and_save
from tests.policy.parity_ranks import build, error_of
from tests.policy.small_checkpoints import left
from tests.policy.tiny_models import Models

UNVERIFIED = "flipped bit without checksums"

SHARD_LIMIT_BYTES = 40_000
"""Enough for what a rank writes at once (random states), too little for a file of shards."""


def two_ranks(models: Models, root: Path, killed: Path) -> dict[str, Any]:
    """Damage, what a kill has left, and files that cannot be written, seen by both of two ranks."""
    with joined(tensor=2) as groups:
        results = {
            "killed": _continue(models["qwen2"], killed, groups),
            "damage": _damage(models, root / "damage", groups),
            "disk full": _disk_full(models["qwen2"], root / "full", groups),
        }
    with joined() as groups:
        results["damage of one"] = _damage_of_one(models["qwen2"], root / "replicas", groups)
    return results


def killed_peer(model: Path, root: Path) -> None:
    """Rank 1 dies in the background writer of step 2; both had a complete step 1."""
    with joined(tensor=2) as groups:
        state = build(model, groups, **OPTIMIZER)
        saver = CheckpointSaver(root, CheckpointConfig(asynchronous=True))
        saver.save(1, state, {"saved": 1})
        saver.wait()
        if groups.rank == 1:
            MCoreSavePlanner.resolve_data = _kill
        saver.save(2, state, {"saved": 2})
        saver.wait()


def killed_reader(model: Path, root: Path) -> None:
    """Rank 1 dies while both load the newest checkpoint."""
    with joined(tensor=2) as groups:
        state = build(model, groups)
        directory = find_latest(root)
        assert directory is not None
        if groups.rank == 1:
            TorchDistLoadShardedStrategy.load = _kill
        load_checkpoint(directory, state)


def delayed_writers(model: Path, root: Path) -> dict[str, Any]:
    """What happens while a background writer is held."""
    results: dict[str, Any] = {}
    with joined() as groups:
        for dtype in ("float32", "bfloat16"):
            place, options = root / dtype, {"dtype": dtype}
            with _held_writers() as release:
                run = train_and_save(
                    model, place, groups, asynchronous=True, before_wait=release, **options
                )
            resumed = resume(model, place, groups, **options)
            results[dtype] = (run["weights"], resumed["weights"])
        for scenario in (_polled, _one_at_a_time, _closed, _failed):
            saver = CheckpointSaver(root / scenario.__name__, CheckpointConfig(asynchronous=True))
            results[scenario.__name__] = scenario(saver, build(model, groups, **OPTIMIZER))
    return results


def _kill(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _continue(model: Path, root: Path, groups: ProcessGroups) -> dict[str, Any]:
    """Load the newest checkpoint, and save over what the kill left."""
    state = build(model, groups)
    directory = find_latest(root)
    assert directory is not None
    extra = load_checkpoint(directory, state)
    save(root, 3, state, {}, keep_last=1)
    return {"loaded": directory.name, "extra": extra, "left": left(root)}


def _damage(models: Models, root: Path, groups: ProcessGroups) -> dict[str, Any]:
    """What every rank says of a damaged step 2, and what of the step 1 beside the last of them."""
    state = build(models["qwen2"], groups)
    for step in (1, 2):
        save(root / "good", step, state, {"saved": step})
    errors = {}
    for name in (*WORDS, UNVERIFIED):
        damaged = root / name
        if groups.rank == 0:
            shutil.copytree(root / "good", damaged)
            if name == UNVERIFIED:
                flip_weight(damaged / "step_2")
                forget_checksums(damaged / "step_2")
            else:
                damage(name, damaged / "step_2")
        torch.distributed.barrier()
        errors[name] = error_of(load_checkpoint, damaged / "step_2", state)
    executed = [path.parent.parent.name for path in root.rglob("executed")]
    previous = load_checkpoint(damaged / "step_1", state)
    other = build(models["qwen3"], groups)
    errors["other model"] = error_of(load_checkpoint, root / "good" / "step_2", other)
    return {"errors": errors, "previous": previous, "executed": executed}


def _damage_of_one(model: Path, root: Path, groups: ProcessGroups) -> str:
    """What a replica says of a record that only one of them reads, for both."""
    state = build(model, groups)
    saved = save(root, 1, state, {})
    if groups.rank == 0:
        flip_weight(saved, whole_record=True)
        forget_checksums(saved)
    torch.distributed.barrier()
    return error_of(load_checkpoint, saved, state)


def _disk_full(model: Path, root: Path, groups: ProcessGroups) -> dict[str, Any]:
    """Saves on which one rank cannot write a file; then what loads, and whether it can save again.

    No file may grow beyond a limit, which the kernel enforces like a full disk.
    """
    state = build(model, groups)
    save(root, 1, state, {"saved": 1})
    full = OSError(errno.ENOSPC, "No space left on device", ".metadata")
    errors = {}
    for mode in ("synchronous", "asynchronous"):
        saver = CheckpointSaver(root, CheckpointConfig(asynchronous=mode == "asynchronous"))
        faults: dict[str, tuple[AbstractContextManager[Any], dict[str, Any]]] = {
            "metadata": (mock.patch.object(ShardWriter, "write_metadata", side_effect=full), {}),
            "not shared": (mock.patch.object(Path, "is_dir", return_value=groups.rank == 0), {}),
            "rollout": (nullcontext(), {"save_rollout": _save_nothing}),
        }
        for full_rank, num_bytes in ((1, SHARD_LIMIT_BYTES), (0, 100), (1, 100)):
            fault = limited(num_bytes) if groups.rank == full_rank else nullcontext()
            faults[f"rank {full_rank}, {num_bytes} bytes"] = (fault, {})
        for name, (fault, options) in faults.items():
            with fault:
                errors[f"{name}, {mode}"] = error_of(_save_and_wait, saver, state, **options)
    latest = find_latest(root)
    assert latest is not None
    loaded = (latest.name, load_checkpoint(latest, build(model, groups)))
    save(root, 2, state, {}, keep_last=1)
    return {"errors": errors, "loaded": loaded, "left": left(root)}


def _save_nothing(path: Path) -> Callable[[], None]:
    """What the rollout's source does on a full disk: it says so when it is waited for."""
    path.write_bytes(b"half")

    def wait() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return wait


def _polled(saver: CheckpointSaver, state: TrainState) -> dict[str, Any]:
    """What is there before and after the writer is released."""
    with _held_writers() as release:
        saver.save(1, state, {})
        saver.poll()
        before = left(saver._root)
        release()
    saver._save.writer.wait()
    saver.poll()
    return {"before": before, "after": left(saver._root)}


def _one_at_a_time(saver: CheckpointSaver, state: TrainState) -> list[str]:
    """The newest checkpoint when a second save has begun while the first was held."""
    with _held_writers(0.5):
        saver.save(1, state, {})
        saver.save(2, state, {})
        latest = find_latest(saver._root)
    saver.wait()
    assert latest is not None
    return [latest.name, *left(saver._root)]


def _closed(saver: CheckpointSaver, state: TrainState) -> dict[str, Any]:
    """A saver that is closed while its writer is at the first tensor."""
    with _held_writers(0.5):
        saver.save(1, state, {})
        saver.close()
    threads = [thread.name for thread in threading.enumerate() if thread.name == "checkpoint"]
    saver.wait()
    before = left(saver._root)
    save(saver._root, 2, state, {})
    return {"threads": threads, "left": before, "later": left(saver._root)}


def _failed(saver: CheckpointSaver, state: TrainState) -> dict[str, Any]:
    """A background error: where it is raised, and what follows."""
    saver.save(1, state, {})
    saver.wait()
    with limited(SHARD_LIMIT_BYTES):
        saver.save(2, state, {})
        saver._save.writer.wait()
    error = error_of(saver.poll)
    saver.save(3, state, {})
    saver.wait()
    return {"error": error, "left": left(saver._root)}


@contextmanager
def _held_writers(held_s: float = 60.0) -> Iterator[Callable[[], None]]:
    """Background writers stop at their first tensor for a time, or until this is called."""
    original, released = MCoreSavePlanner.resolve_data, threading.Event()

    def hold(*args: Any) -> Any:
        released.wait(held_s)
        released.set()
        return original(*args)

    with mock.patch.object(MCoreSavePlanner, "resolve_data", hold):
        yield released.set
        released.set()


def _save_and_wait(saver: CheckpointSaver, state: TrainState, **options: Any) -> None:
    saver.save(2, state, {"saved": 2}, **options)
    saver.wait()
