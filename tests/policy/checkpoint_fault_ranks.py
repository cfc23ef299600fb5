"""What the ranks of test_checkpoint_faults.py do: saves that are killed, delayed or fail."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
)

from bapo_megatron.config.megatron import ParallelConfig
from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.policy import checkpoint_files
from bapo_megatron.policy.checkpoint import CheckpointSaver, load_checkpoint
from bapo_megatron.policy.checkpoint_files import CheckpointError, find_latest
from bapo_megatron.policy.checkpoint_shards import ShardWriter
from bapo_megatron.runtime.distributed import ProcessGroups, init_distributed
from tests.distributed_launch import joined
from tests.policy.checkpoint_damages import DAMAGES, flip
from tests.policy.checkpoint_ranks import OPTIMIZER, resume, save, train_and_save, update
from tests.policy.parity_ranks import build, snapshot

KILLED = (
    ("in the first shard", "synchronous"),
    ("in a later shard", "asynchronous"),
    ("before the metadata", "synchronous"),
    ("before the rename", "asynchronous"),
    ("before the pointer moves", "synchronous"),
    ("after the pointer moved", "asynchronous"),
)
"""Moments of a save, and its mode: modes differ in who writes the shards, and in nothing later."""

LATE = "after the pointer moved"
"""The only moment at which the new checkpoint is the last complete one."""

SHARD_LIMIT_BYTES = 40_000
"""Enough for what a rank writes at once (random states), too little for a file of shards."""


def killed_saves(model: Path, root: Path) -> dict[str, Any]:
    """Save step 1, die while saving step 2; what is loaded then, and what the next save leaves.

    Each kill ends a process of its own, forked from this one, which has imported everything.
    """
    results = {}
    for moment, mode in KILLED:
        status = _in_fork(_die, moment, mode == "asynchronous", model, root / moment)
        results[moment] = {"code": status}
    with joined() as groups:
        for moment, result in results.items():
            result |= _continue(model, root / moment, groups)
    return results


def two_ranks(models: dict[str, Path], root: Path, killed: Path) -> dict[str, Any]:
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
        policy = build(model, groups, **OPTIMIZER)
        saver = CheckpointSaver(root, CheckpointConfig(asynchronous=True))
        saver.save(1, policy, {"saved": 1})
        saver.wait()
        if groups.rank == 1:
            MCoreSavePlanner.resolve_data = _kill
        saver.save(2, policy, {"saved": 2})
        saver.wait()


def killed_reader(model: Path, root: Path) -> None:
    """Rank 1 dies while both load the newest checkpoint."""
    with joined(tensor=2) as groups:
        policy = build(model, groups)
        directory = find_latest(root)
        assert directory is not None
        if groups.rank == 1:
            TorchDistLoadShardedStrategy.load = _kill
        load_checkpoint(directory, policy)


def delayed_writers(model: Path, root: Path) -> dict[str, Any]:
    """What happens while a background writer is held."""
    results: dict[str, Any] = {"unchanged": {}}
    with joined() as groups:
        for dtype in ("float32", "bfloat16"):
            for distributed in (True, False):
                name = f"{dtype}, {'distributed' if distributed else 'plain'} optimizer"
                options = {"dtype": dtype, "megatron": {"distributed_optimizer": distributed}}
                with _held_writers() as release:
                    run = train_and_save(
                        model,
                        root / name,
                        groups,
                        asynchronous=True,
                        before_wait=release,
                        **options,
                    )
                resumed = resume(model, root / name, groups, **options)
                results["unchanged"][name] = (run["weights"], resumed["weights"])
        results["polled"] = _polled(model, root / "polled", groups)
        results["one at a time"] = _one_at_a_time(model, root / "one", groups)
        results["closed"] = _closed(model, root / "closed", groups)
        results["failed"] = _failed(model, root / "failed", groups)
    return results


def _in_fork(function: Callable[..., None], *args: Any) -> int:
    """Run it in a fork that is a single rank without torchrun; returns its status."""
    pid = os.fork()
    if pid == 0:
        try:
            del os.environ["RANK"]
            function(*args)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _die(moment: str, asynchronous: bool, model: Path, root: Path) -> None:
    groups = init_distributed(ParallelConfig())
    policy = build(model, groups)
    save(root, 1, policy, {"saved": 1})
    _arm(moment)
    saver = CheckpointSaver(root, CheckpointConfig(asynchronous=asynchronous, keep_last=1))
    saver.save(2, policy, {"saved": 2})
    saver.wait()


def _arm(moment: str) -> None:
    """Kill this process at a moment of the next save."""
    if moment == "in the first shard":
        MCoreSavePlanner.resolve_data = _kill
    elif moment == "in a later shard":
        _kill_in(MCoreSavePlanner, "resolve_data", call=20)
    elif moment == "before the metadata":
        ShardWriter.write_metadata = _kill
    elif moment == "before the rename":
        checkpoint_files.publish_directory = _kill
    elif moment == "before the pointer moves":
        # state.json is written by the first call, the pointer by the second.
        _kill_in(checkpoint_files, "atomic_write_text", call=2)
    else:
        # Step 1 is renamed and about to be removed.
        checkpoint_files.shutil = SimpleNamespace(rmtree=_kill)


def _kill_in(module: Any, name: str, call: int) -> None:
    original = getattr(module, name)
    calls = iter(range(1, call + 1))

    def count(*args: Any) -> Any:
        return _kill() if next(calls) == call else original(*args)

    setattr(module, name, count)


def _kill(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _continue(model: Path, root: Path, groups: ProcessGroups) -> dict[str, Any]:
    """Load the newest checkpoint, and save over what the kill left."""
    policy = build(model, groups)
    directory = find_latest(root)
    assert directory is not None
    extra = load_checkpoint(directory, policy)
    save(root, 3, policy, {}, keep_last=1)
    left = sorted(path.name for path in root.iterdir())
    return {"loaded": directory.name, "extra": extra, "left": left}


def _damage(models: dict[str, Path], root: Path, groups: ProcessGroups) -> dict[str, Any]:
    """What every rank says of a damaged step 2, and what of the step 1 beside the last of them."""
    policy = build(models["qwen2"], groups)
    for step in (1, 2):
        save(root / "good", step, policy, {"saved": step})
    errors = {}
    for name, spoil in DAMAGES.items():
        damaged = root / name
        if groups.rank == 0:
            shutil.copytree(root / "good", damaged)
            spoil(damaged / "step_2")
        torch.distributed.barrier()
        errors[name] = _load_error(damaged / "step_2", policy)
    silent = root / "unverified"
    if groups.rank == 0:
        shutil.copytree(root / "good", silent)
        flip(silent / "step_2", verified=False)
    torch.distributed.barrier()
    errors["flipped bit without checksums"] = _load_error(silent / "step_2", policy)
    executed = [path.parent.parent.name for path in root.rglob("executed")]
    previous = load_checkpoint(damaged / "step_1", policy)
    for name, model, megatron in (
        ("other model", "qwen3", {}),
        ("other width", "wide", {}),
        ("other depth", "deep", {}),
        ("other optimizer", "qwen2", {"distributed_optimizer": False}),
    ):
        other = build(models[model], groups, megatron=megatron)
        errors[name] = _load_error(root / "good" / "step_2", other)
    return {"errors": errors, "previous": previous, "executed": executed}


def _damage_of_one(model: Path, root: Path, groups: ProcessGroups) -> str:
    """What a replica says of a record that only one of them reads, for both."""
    policy = build(model, groups)
    saved = save(root, 1, policy, {})
    if groups.rank == 0:
        flip(saved, verified=False, whole_record=True)
    torch.distributed.barrier()
    return _load_error(saved, policy)


def _disk_full(model: Path, root: Path, groups: ProcessGroups) -> dict[str, Any]:
    """Saves on which one rank cannot write a file; then what loads, and whether it can save again.

    No file may grow beyond a limit, which the kernel enforces like a full disk.
    """
    policy = build(model, groups)
    save(root, 1, policy, {"saved": 1})
    errors = {}
    for asynchronous in (False, True):
        saver = CheckpointSaver(root, CheckpointConfig(asynchronous=asynchronous))
        mode = "asynchronous" if asynchronous else "synchronous"
        for full_rank, limit_bytes in ((1, SHARD_LIMIT_BYTES), (0, 100), (1, 100)):
            with _limited(limit_bytes if groups.rank == full_rank else None):
                error = _save_error(saver, 2, policy)
            errors[f"rank {full_rank}, {limit_bytes} bytes, {mode}"] = error
        with _failing_metadata():
            errors[f"metadata, {mode}"] = _save_error(saver, 2, policy)
        with mock.patch.object(Path, "is_dir", return_value=groups.rank == 0):
            errors[f"not shared, {mode}"] = _save_error(saver, 2, policy)
        errors[f"rollout, {mode}"] = _save_error(saver, 2, policy, save_rollout=_save_nothing)
    latest = find_latest(root)
    assert latest is not None
    loaded = (latest.name, load_checkpoint(latest, build(model, groups)))
    save(root, 2, policy, {}, keep_last=1)
    left = sorted(path.name for path in root.iterdir())
    return {"errors": errors, "loaded": loaded, "left": left}


def _save_nothing(path: Path) -> Callable[[], None]:
    """What the rollout's source does on a full disk: it says so when it is waited for."""
    path.write_bytes(b"half")

    def wait() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return wait


def _polled(model: Path, root: Path, groups: ProcessGroups) -> dict[str, Any]:
    """What is there before and after the writer is released."""
    saver = CheckpointSaver(root, CheckpointConfig(asynchronous=True))
    with _held_writers() as release:
        saver.save(1, build(model, groups), {})
        saver.poll()
        before = sorted(path.name for path in root.iterdir())
        release()
    deadline = time.monotonic() + 30
    while find_latest(root) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
        saver.poll()
    return {"before": before, "after": sorted(path.name for path in root.iterdir())}


def _one_at_a_time(model: Path, root: Path, groups: ProcessGroups) -> list[str]:
    """The newest checkpoint when a second save has begun while the first was held."""
    saver = CheckpointSaver(root, CheckpointConfig(asynchronous=True))
    policy = build(model, groups)
    with _held_writers() as release:
        saver.save(1, policy, {})
        timer = threading.Timer(0.5, release)
        timer.start()
        saver.save(2, policy, {})
        latest = find_latest(root)
        timer.join()
    saver.wait()
    assert latest is not None
    return [latest.name, *sorted(path.name for path in root.iterdir())]


def _closed(model: Path, root: Path, groups: ProcessGroups) -> dict[str, Any]:
    """A saver that is closed while its writer is at the first tensor."""
    saver = CheckpointSaver(root, CheckpointConfig(asynchronous=True))
    policy = build(model, groups)
    with _held_writers() as release:
        saver.save(1, policy, {})
        timer = threading.Timer(0.5, release)
        timer.start()
        saver.close()
        timer.join()
    threads = [thread.name for thread in threading.enumerate() if thread.name == "checkpoint"]
    saver.wait()
    left = sorted(path.name for path in root.iterdir())
    save(root, 2, policy, {})
    return {"threads": threads, "left": left, "later": sorted(p.name for p in root.iterdir())}


def _failed(model: Path, root: Path, groups: ProcessGroups) -> dict[str, Any]:
    """A background error: where it is raised, and what follows."""
    saver = CheckpointSaver(root, CheckpointConfig(asynchronous=True))
    policy = build(model, groups, **OPTIMIZER)
    saver.save(1, policy, {"saved": 1})
    saver.wait()
    with _limited(SHARD_LIMIT_BYTES):
        saver.save(2, policy, {})
        saver._save.writer.wait()
    before = snapshot(policy)
    update(policy)
    error = ""
    try:
        saver.poll()
    except OSError as caught:
        error = str(caught)
    latest = find_latest(root)
    assert latest is not None
    extra = load_checkpoint(latest, policy)
    loaded = snapshot(policy)
    same = all(torch.equal(loaded[name], before[name]) for name in before)
    saver.save(3, policy, {})
    saver.wait()
    return {
        "error": error,
        "extra": extra,
        "same": same,
        "left": sorted(path.name for path in root.iterdir()),
    }


@contextmanager
def _held_writers() -> Iterator[Callable[[], None]]:
    """Background writers stop at their first tensor until what is given is called."""
    original = MCoreSavePlanner.resolve_data
    released = threading.Event()

    def hold(*args: Any) -> Any:
        assert released.wait(60)
        return original(*args)

    MCoreSavePlanner.resolve_data = hold
    try:
        yield released.set
    finally:
        released.set()
        MCoreSavePlanner.resolve_data = original


@contextmanager
def _limited(limit_bytes: int | None) -> Iterator[None]:
    """No file of this process may grow beyond the limit."""
    if limit_bytes is None:
        yield
        return
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, unlimited[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


@contextmanager
def _failing_metadata() -> Iterator[None]:
    """The disk is full when all shards are written."""
    full = OSError(errno.ENOSPC, "No space left on device", ".metadata")
    with mock.patch.object(ShardWriter, "write_metadata", side_effect=full):
        yield


def _save_error(saver: CheckpointSaver, step: int, policy: Any, **options: Any) -> str:
    try:
        saver.save(step, policy, {"saved": step}, **options)
        saver.wait()
    except OSError as error:
        return str(error)
    return "no error"


def _load_error(directory: Path, policy: Any) -> str:
    try:
        load_checkpoint(directory, policy)
    except CheckpointError as error:
        return str(error)
    return "no error"
