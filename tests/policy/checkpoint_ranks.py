"""What the ranks of test_policy_checkpoint.py do."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.distributed import ProcessGroups
from bapo_megatron.policy import checkpoint
from bapo_megatron.policy.checkpoint import find_latest, load_checkpoint, save_checkpoint
from bapo_megatron.policy.megatron_policy import MegatronPolicy
from tests.distributed_launch import joined
from tests.policy.parity_ranks import build, forward_backward, own_problems, snapshot

OPTIMIZER = {
    "lr": 1e-2,
    "schedule": "linear",
    "weight_decay": 0.1,
    # Adam divides tiny gradients by their own size, rounding errors included. This epsilon is above
    # those errors, so that layouts, which round differently, can be compared.
    "eps": 1e-3,
}
NUM_UPDATES = 4
EXTRA = {"data": {"epoch": 1, "row": 7}, "unfinished": ["a", "ß"], "share": 0.1}


def train(policy: MegatronPolicy) -> list[dict[str, Tensor]]:
    """Weights after each of the updates that are left."""
    weights = []
    while policy.num_updates < NUM_UPDATES:
        forward_backward(policy, own_problems(policy.groups, seed=policy.num_updates))
        assert policy.optimizer_step().applied
        weights.append(snapshot(policy))
    return weights


def train_and_save(model: Path, root: Path, groups: ProcessGroups) -> dict[str, Any]:
    """An uninterrupted run that saves after its first update."""
    policy = build(model, groups, **OPTIMIZER)
    forward_backward(policy, own_problems(groups, seed=0))
    policy.optimizer_step()
    first = snapshot(policy)
    random.random(), torch.rand(3)
    save_checkpoint(root, 1, policy, EXTRA, keep_last=2)
    drawn = (random.random(), torch.rand(3))
    return {"weights": [first, *train(policy)], "lr": policy.lr, "drawn": drawn}


def resume(model: Path, root: Path, groups: ProcessGroups) -> dict[str, Any]:
    """The run continued from its checkpoint by a fresh policy."""
    policy = build(model, groups, **OPTIMIZER)
    directory = find_latest(root)
    assert directory is not None
    extra = load_checkpoint(directory, policy)
    drawn = (random.random(), torch.rand(3))
    return {
        "extra": extra,
        "drawn": drawn,
        "num_updates": policy.num_updates,
        "weights": [snapshot(policy), *train(policy)],
        "lr": policy.lr,
    }


def two_ranks(model: Path, root: Path) -> dict[str, Any]:
    """Save in both two-rank layouts; resume in the same and in the other one."""
    results = {}
    for tensor, name in ((2, "tensor"), (1, "data")):
        with joined(tensor) as groups:
            results[name] = train_and_save(model, root / name, groups)
            results[f"{name} from {name}"] = resume(model, root / name, groups)
    with joined(2) as groups:
        results["tensor from data"] = resume(model, root / "data", groups)
    with joined(1) as groups:
        results["data from tensor"] = resume(model, root / "tensor", groups)
    return results


def one_rank(models: dict[str, Path], root: Path) -> dict[str, Any]:
    """An uninterrupted run, and resumptions of what two ranks saved."""
    model = models["qwen2"]
    with joined() as groups:
        results = {"single": train_and_save(model, root / "single", groups)}
        for name in ("single", "tensor", "data"):
            results[f"single from {name}"] = resume(model, root / name, groups)
        results["kept"] = _kept_steps(model, root / "kept", groups)
        results["kept_after_abandoned"] = _kept_after_abandoned(model, root / "abandoned", groups)
        results["errors"] = _errors(models, root / "single" / "step_1", root / "damaged", groups)
        results["disk_full"] = _disk_full(model, root / "full", groups)
        results["bfloat16"] = _bfloat16(model, root / "bfloat16", groups)
    return results


def save_killed_at(moment: str, model: Path, root: Path) -> None:
    """Save step 1, then die while saving step 2."""
    with joined() as groups:
        policy = build(model, groups)
        save_checkpoint(root, 1, policy, {"saved": 1}, keep_last=1)

        def die(*args: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if moment == "before the rename":
            checkpoint.publish_directory = die
        elif moment == "while Megatron writes":
            checkpoint.torch.save = die
        else:
            write = checkpoint.atomic_write_text
            checkpoint.atomic_write_text = lambda path, text: (
                die() if path.name == "latest" else write(path, text)
            )
        save_checkpoint(root, 2, policy, {"saved": 2}, keep_last=1)


def continue_after_kill(model: Path, roots: list[Path]) -> list[dict[str, Any]]:
    """Load the newest checkpoint of each root, and save over what the kill left."""
    results = []
    with joined() as groups:
        for root in roots:
            policy = build(model, groups)
            directory = find_latest(root)
            assert directory is not None
            result = {"loaded": directory.name, "extra": load_checkpoint(directory, policy)}
            save_checkpoint(root, 2, policy, {"saved": 2}, keep_last=1)
            result["left"] = sorted(path.name for path in root.iterdir())
            results.append(result)
    return results


def _kept_steps(model: Path, root: Path, groups: ProcessGroups) -> list[str]:
    policy = build(model, groups)
    for step in (9, 10, 11):
        save_checkpoint(root, step, policy, {}, keep_last=2)
    return sorted(path.name for path in root.iterdir())


def _kept_after_abandoned(model: Path, root: Path, groups: ProcessGroups) -> list[str]:
    """``latest`` is set back by hand, and the new try saves where the old one had gone further."""
    policy = build(model, groups)
    for step in (2, 5, 6):
        save_checkpoint(root, step, policy, {}, keep_last=3)
    (root / "latest").write_text("step_2\n")
    saved = save_checkpoint(root, 3, policy, {}, keep_last=3)
    assert find_latest(root) == saved
    return sorted(path.name for path in root.iterdir())


def _errors(
    models: dict[str, Path], good: Path, scratch: Path, groups: ProcessGroups
) -> dict[str, str]:
    errors = {}
    for name in ("truncated", "missing", "no state", "bad state", "format"):
        damaged = scratch / name
        shutil.copytree(good, damaged)
        part = next(damaged.glob("*.distcp"))
        state = damaged / "state.json"
        if name == "truncated":
            part.write_bytes(part.read_bytes()[:-1])
        elif name == "missing":
            part.unlink()
        elif name == "no state":
            state.unlink()
        elif name == "bad state":
            state.write_text('{"num_updates": 1}')
        else:
            state.write_text(state.read_text().replace('"format": 1', '"format": 99'))
        errors[name] = _load_error(damaged, build(models["qwen2"], groups))
    errors["other model"] = _load_error(good, build(models["qwen3"], groups))
    errors["other width"] = _load_error(good, build(models["wide"], groups))
    return errors


def _load_error(directory: Path, policy: MegatronPolicy) -> str:
    try:
        load_checkpoint(directory, policy)
    except checkpoint.CheckpointError as error:
        return str(error)
    return "no error"


def _disk_full(model: Path, root: Path, groups: ProcessGroups) -> dict[str, Any]:
    """Save while no file may grow beyond 4 kB."""
    policy = build(model, groups)
    save_checkpoint(root, 1, policy, {"saved": 1}, keep_last=1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, unlimited[1]))
    result: dict[str, Any] = {"error": "no error"}
    try:
        save_checkpoint(root, 2, policy, {"saved": 2}, keep_last=1)
    except OSError as error:
        result["error"] = str(error)
    try:
        policy.export_hf(root / "export")
    except OSError as error:
        result["export_error"] = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    latest = find_latest(root)
    assert latest is not None
    result["extra"] = load_checkpoint(latest, policy)
    result["exported"] = (root / "export").exists()
    return result


def _bfloat16(model: Path, root: Path, groups: ProcessGroups) -> dict[str, Any]:
    """Whether the float32 master weights survive: without them resumption would round."""
    policy = build(model, groups, dtype="bfloat16", **OPTIMIZER)
    forward_backward(policy, own_problems(groups, seed=0))
    policy.optimizer_step()
    save_checkpoint(root, 1, policy, {}, keep_last=1)
    uninterrupted = train(policy)
    resumed = build(model, groups, dtype="bfloat16", **OPTIMIZER)
    load_checkpoint(root / "step_1", resumed)
    return {"uninterrupted": uninterrupted, "resumed": train(resumed)}
