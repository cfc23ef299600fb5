"""What the ranks of test_policy_checkpoint.py do: train, save, and continue in any layout."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import dist_checkpointing
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan

from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.policy.checkpoint import CheckpointSaver, load_checkpoint
from bapo_megatron.policy.checkpoint_files import find_latest
from bapo_megatron.policy.train_state import TrainState
from bapo_megatron.runtime.distributed import ProcessGroups
from tests.distributed_launch import joined
from tests.policy.layouts import Case, in_layouts
from tests.policy.parity_ranks import build, forward_backward, problems_of, snapshot
from tests.policy.tiny_models import Models
from tests.tolerances import EPS, HEADROOM

OPTIMIZER = {
    "lr": 1e-2,
    "schedule": "linear",
    "weight_decay": 0.1,
    # Adam divides tiny gradients by their own size, rounding errors included. This epsilon is above
    # those errors, so that layouts, which round differently, can be compared.
    "eps": 1e-3,
}
TOLERANCE = 1e-2 / 1e-3 * HEADROOM * EPS
"""Of weights of two layouts: clipped gradients have norm 1 and err by some ε of it, and Adam's
steps are up to lr / eps times as large. Updates move weights by over 3e-4."""
NUM_UPDATES = 2
MASTER_PREFIX = "optimizer.state.param."
EXTRA = {"data": {"epoch": 1, "row": 7}, "unfinished": ["a", "ß"], "share": 0.1}

Layouts = dict[int, dict[str, dict[str, Any]]]
"""By number of ranks and name: sizes of ``ParallelConfig``."""
_PIPELINE, _INTERLEAVED = {"pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2}
DENSE: Layouts = {
    1: {"single": {}},
    2: {
        "TP2": {"tensor": 2},
        "DP2": {},
        "PP2": _PIPELINE,
        "PP2 VPP2": _INTERLEAVED,
        "CP2": {"context": 2},
        "overlapped DP2": {},
    },
    4: {"TP2 PP2": {"tensor": 2, **_PIPELINE}, "DP2 CP2": {"context": 2}},
}
SETTINGS = {"overlapped DP2": {"overlap_grad_reduce": True, "overlap_param_gather": True}}
"""Settings of ``MegatronConfig`` of a layout, which saves in the foreground."""


def update(state: TrainState) -> None:
    """One optimizer update on tokens that depend on its number."""
    forward_backward(state, problems_of(state.model.groups, seed=state.num_updates))
    assert state.optimizer_step().applied


def weights_of(state: TrainState) -> dict[str, Tensor]:
    """Copies of all weights; the last update may still be under way to some of them."""
    state.model.finish_weights()
    return snapshot(state)


def train(state: TrainState) -> list[dict[str, Tensor]]:
    """Weights after each of the updates that are left."""
    weights = []
    while state.num_updates < NUM_UPDATES:
        update(state)
        weights.append(weights_of(state))
    return weights


def save(root: Path, step: int, state: TrainState, extra: dict[str, Any], **config: Any) -> Path:
    """Save in the foreground."""
    return CheckpointSaver(root, CheckpointConfig(**config)).save(step, state, extra)


def train_and_save(
    model: Path,
    root: Path,
    groups: ProcessGroups,
    *,
    asynchronous: bool = False,
    before_wait: Callable[[], None] = lambda: None,
    **options: Any,
) -> dict[str, Any]:
    """An uninterrupted run that saves after its first update.

    ``before_wait`` is called when training has ended and before the save must be complete.
    """
    state = build(model, groups, **OPTIMIZER, **options)
    update(state)
    random.random(), torch.rand(3)
    saver = CheckpointSaver(root, CheckpointConfig(asynchronous=asynchronous))
    saver.save(1, state, EXTRA)
    drawn = (random.random(), torch.rand(3))
    weights = [weights_of(state), *train(state)]
    before_wait()
    saver.wait()
    return {"weights": weights, "lr": state.lr, "drawn": drawn}


def resume(model: Path, root: Path, groups: ProcessGroups, **options: Any) -> dict[str, Any]:
    """The run continued from its checkpoint by a fresh state."""
    state = build(model, groups, **OPTIMIZER, **options)
    directory = find_latest(root)
    assert directory is not None
    with _bytes_read() as lengths:
        extra = load_checkpoint(directory, state)
    drawn = (random.random(), torch.rand(3))
    return {
        "bytes_read": sum(lengths),
        "bytes_saved": {p.name: p.stat().st_size for p in directory.glob("*.distcp")},
        "extra": extra,
        "drawn": drawn,
        "num_updates": state.num_updates,
        "weights": [weights_of(state), *train(state)],
        "lr": state.lr,
    }


@contextmanager
def _bytes_read() -> Iterator[list[int]]:
    """Lengths of what this rank reads of shards."""
    lengths: list[int] = []
    original = FileSystemReader.read_data

    def read_data(self: FileSystemReader, plan: LoadPlan, planner: Any) -> Any:
        lengths.extend(self.storage_data[item.storage_index].length for item in plan.items)
        return original(self, plan, planner)

    with mock.patch.object(FileSystemReader, "read_data", read_data):
        yield lengths


def run_layouts(
    model: Path, root: Path, layouts: dict[str, dict[str, Any]], sources: dict[str, list[str]]
) -> dict[str, Any]:
    """Save in each layout under ``root``, and continue from what it and its sources saved."""
    results: dict[str, Any] = {}
    for layout, sizes in layouts.items():
        with joined(**sizes) as groups:
            options: dict[str, Any] = {"megatron": SETTINGS.get(layout)}
            results[layout] = train_and_save(
                model, root / layout, groups, asynchronous=layout not in SETTINGS, **options
            )
            for source in [layout, *sources.get(layout, [])]:
                resumed = resume(model, root / source, groups, **options)
                results[f"{layout} from {source}"] = resumed
    return results


def run_chains(
    cases: Sequence[Case], models: Models, root: Path, order: Sequence[Case]
) -> dict[str, Any]:
    """By case: weights of an uninterrupted run, and of those continued from checkpoints.

    These are its own, and that of the family's case before it in ``order``.
    """
    results: dict[str, Any] = {}
    for case, groups in in_layouts(cases):
        model = models[case.family]
        of_family = [str(other) for other in order if other.family == case.family]
        place = of_family.index(str(case))
        trained = train_and_save(model, root / str(case), groups, asynchronous=True)
        sources = [str(case), *of_family[:place][-1:]]
        results[str(case)] = {
            "trained": trained["weights"],
            "resumed": [resume(model, root / source, groups)["weights"] for source in sources],
        }
    return results


def last_rank(model: Path, root: Path, sources: list[str]) -> dict[str, Any]:
    """A single rank continues what others saved."""
    with joined() as groups:
        return {f"single from {s}": resume(model, root / s, groups) for s in sources}


def single_rank(model: Path, root: Path) -> dict[str, Any]:
    """What needs no other layout."""
    results: dict[str, Any] = {}
    with joined() as groups:
        results["stale"] = _stale_weights(root / "overlapped DP2" / "step_1")
        first, continued = (build(model, groups) for _ in range(2))
        saved = save(root / "start", 0, first, {})
        load_checkpoint(saved, continued)
        results["start"] = {"uninterrupted": train(first), "resumed": train(continued)}
        changed = {"lr": 2e-3, "min_lr": 1e-3, "schedule": "constant", "weight_decay": 0.3}
        changed |= {"beta1": 0.8, "beta2": 0.9, "eps": 1e-4}
        results["changed"] = _changed_groups(model, saved, groups, changed)
    return results


def _changed_groups(
    model: Path, directory: Path, groups: ProcessGroups, changed: dict[str, Any]
) -> list[dict[str, Any]]:
    """Settings of the update that continues with other ones."""
    state = build(model, groups, **{**OPTIMIZER, **changed})
    load_checkpoint(directory, state)
    update(state)
    names = ("lr", "weight_decay", "betas", "eps")
    return [{name: group[name] for name in names} for group in state.optimizer.param_groups]


def _stale_weights(directory: Path) -> list[str]:
    """Weights of a float32 checkpoint that are not the optimizer's own copies of them."""
    tensors = dist_checkpointing.load_plain_tensors(str(directory))
    masters = {name: value for name, value in tensors.items() if name.startswith(MASTER_PREFIX)}
    assert len(masters) == 10  # embedding, final norm, and eight of a layer
    return [n for n, value in masters.items() if not value.equal(tensors[n[len(MASTER_PREFIX) :]])]
