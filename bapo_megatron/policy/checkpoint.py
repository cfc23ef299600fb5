"""Checkpoints that are complete or absent, and that load into any layout.

``CheckpointSaver`` saves and ``load_checkpoint`` loads; ``checkpoint_files`` names and publishes
the files, ``checkpoint_shards`` writes each rank's part.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.policy import checkpoint_files as files
from bapo_megatron.policy.checkpoint_reader import CheckpointReader
from bapo_megatron.policy.checkpoint_shards import ShardWriter, torch_bytes
from bapo_megatron.policy.model import Model
from bapo_megatron.policy.optimizer import load_state, sharded_state
from bapo_megatron.policy.train_state import TrainState
from bapo_megatron.runtime.distributed import (
    ProcessGroups,
    any_rank,
    barrier,
    fail_together,
    gather_objects,
)
from bapo_megatron.runtime.files import atomic_write_bytes
from bapo_megatron.runtime.processes import environment_set
from bapo_megatron.telemetry.console import say

METADATA = {
    # Megatron's default cannot be loaded into another layout.
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}


@dataclass(frozen=True, slots=True)
class _Save:
    step: int
    fields: dict[str, Any]
    """Fields of ``CheckpointState``, as they were when the save began."""
    writer: ShardWriter
    groups: ProcessGroups
    best: files.BestCheckpoint | None
    wait_for_rollout: Callable[[], None] | None


class CheckpointSaver:
    """Saves the checkpoints of a run, one at a time.

    With ``asynchronous`` a save returns when the state is copied; the checkpoint appears in a later
    ``poll``, ``save`` or ``wait``. These are collectives over all ranks, and raise an ``OSError``
    on all of them if the new checkpoint cannot be written; complete ones are untouched.
    """

    def __init__(
        self,
        root: Path,
        config: CheckpointConfig,
        *,
        on_publish: Callable[[Path], None] = lambda _: None,
    ) -> None:
        """Rank 0 calls ``on_publish`` with every complete checkpoint."""
        self._root, self._config, self._on_publish = root, config, on_publish
        self._save: _Save | None = None

    def save(
        self,
        step: int,
        train_state: TrainState,
        extra: dict[str, Any],
        best: files.BestCheckpoint | None = None,
        *,
        save_rollout: Callable[[Path], Callable[[], None]] | None = None,
    ) -> Path:
        """Save everything needed to resume; return the checkpoint's directory.

        The directory exists once the checkpoint is complete; one of the same number is replaced.
        ``extra`` is the caller's state, plain JSON values; ``best`` goes into the file ``best``.
        ``save_rollout`` starts writing a further file and returns a function that waits for it.
        """
        self.wait()
        model = train_state.model
        groups, unfinished = model.groups, files.unfinished_directory(self._root, step)
        wait_for_rollout = None
        with _written_together(self._root, step, groups):
            if groups.rank == 0:
                files.remove_unfinished(self._root)
                unfinished.mkdir(parents=True)
        model.finish_weights()
        shards = _sharded_state(train_state, is_loading=False)
        writer = ShardWriter(shards, unfinished, groups, copies=self._config.asynchronous)
        with _written_together(self._root, step, groups):
            if not unfinished.is_dir():
                raise files.not_shared(unfinished.name)
            if groups.rank == 0 and save_rollout is not None:
                wait_for_rollout = save_rollout(unfinished / files.ROLLOUT_NAME)
            atomic_write_bytes(unfinished / _rng_name(groups.rank), torch_bytes(_rng_state(groups)))
        fields = {
            "num_updates": train_state.num_updates,
            "layout": rng_layout(groups),
            "lora": model.lora.identity if model.lora else None,
            "extra": json.loads(json.dumps(extra)),  # a copy: the caller keeps changing it
        }
        self._save = _Save(step, fields, writer, groups, best, wait_for_rollout)
        if self._config.asynchronous:
            writer.thread.start()
        else:
            writer.write()
            self.wait()
        return files.step_directory(self._root, step)

    def poll(self) -> None:
        """Publish the checkpoint that was being written, if every rank has written its part."""
        save = self._save
        if save is not None and not any_rank(save.writer.thread.is_alive(), save.groups.control):
            self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and publish it."""
        if self._save is None:
            return
        self._save.writer.wait()
        save, self._save = self._save, None
        root, groups, writer = self._root, save.groups, save.writer
        with _written_together(root, save.step, groups):
            if writer.error is not None:
                raise OSError(files.reason_of(writer.error)) from writer.error
            if save.wait_for_rollout is not None:
                save.wait_for_rollout()
        by_rank = gather_objects((writer.results, writer.pieces), groups)
        with _written_together(root, save.step, groups):
            if by_rank is not None:
                writer.write_metadata([results for results, _ in by_rank])
                pieces = {name: sums for _, part in by_rank for name, sums in part.items()}
                files.write_checksums(files.unfinished_directory(root, save.step), pieces)
                names = [*pieces, *(_rng_name(rank) for rank in range(len(by_rank)))]
                files.publish(root, save.step, save.fields, names)
                self._on_publish(files.step_directory(root, save.step))
                if save.best is not None:
                    files.name_best(root, save.best)
        if groups.rank == 0:
            try:
                files.remove_others(root, save.step, self._config)
            except (OSError, files.CheckpointError) as error:
                # The new checkpoint is complete nevertheless.
                say(f"cannot remove an old checkpoint under {root} ({error}); remove it by hand")
        barrier(groups)

    def close(self) -> None:
        """Abandon a save in progress. Not a collective: other ranks may be gone."""
        if self._save is not None:
            self._save.writer.abandon()
            self._save = None


@contextmanager
def _written_together(root: Path, step: int, groups: ProcessGroups) -> Iterator[None]:
    """Raise an ``OSError`` of the block on every rank, and remove what was written."""
    try:
        with fail_together(groups):
            try:
                yield
            except OSError as error:
                raise OSError(
                    f"cannot write {files.step_directory(root, step)}: {error}; the last complete "
                    "checkpoint is untouched"
                ) from error
    except OSError:
        if groups.rank == 0:
            shutil.rmtree(files.unfinished_directory(root, step), ignore_errors=True)
        raise


def load_checkpoint(
    directory: Path, train_state: TrainState, *, verify: bool = True
) -> dict[str, Any]:
    """Continue from a checkpoint of this layout or another; return its ``extra``.

    A collective over all ranks. No code from the files runs. With ``verify``, files are first
    compared with their checksums. Random states are restored if the layout is the same.

    Raises:
        CheckpointError: The checkpoint is incomplete, damaged or of another model; raised on every
            rank.
    """
    groups = train_state.model.groups
    with fail_together(groups, files.CheckpointError), files.damage_of(directory):
        state = files.read_state(directory)
        if groups.rank == 0:
            files.check_files(directory, state)
            _check_adapters(directory, state.lora, train_state.model)
    with fail_together(groups, files.CheckpointError), files.damage_of(directory):
        _check_content(directory, groups, verify=verify)
        rng, name = None, _rng_name(groups.rank)
        if state.layout == rng_layout(groups):
            with files.reading(name):
                rng = torch.load(directory / name, weights_only=True)
    loaded = _load_shards(directory, train_state)
    for number, trained in enumerate(_trained_modules(train_state)):
        trained.load_state_dict(loaded[f"model{number}"])
    load_state(train_state.optimizer, loaded["optimizer"])
    train_state.num_updates = state.num_updates
    if rng is not None:
        _restore_rng(rng)
    return state.extra


def _check_content(directory: Path, groups: ProcessGroups, *, verify: bool) -> None:
    """Check this rank's share of the contents; raise ``DamagedError`` if damaged."""
    reader = CheckpointReader(directory, verify=verify, small_files=groups.rank == 0)
    places = list(reader.places.values())
    # If the layout has not changed, the file that a rank wrote is in its page cache.
    names = sorted({place.relative_path for place in places}, key=lambda name: (len(name), name))
    my_names = names[groups.rank :: groups.world_size]
    reader.verify(place for place in places if place.relative_path in my_names)


class _AgreeingLoadStrategy(TorchDistLoadShardedStrategy):
    """Reads this rank's shards, then waits for all ranks; a failure on one is raised on all.

    Megatron runs no collective before the exchange, so the others would wait for a rank that
    failed.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        super().__init__()
        self._groups = groups

    def load(self, state: dict[str, Any], directory: Path, *args: Any) -> dict[str, Any]:
        with _read_together(Path(directory), self._groups):
            return super().load(state, directory, *args)


def _load_shards(directory: Path, train_state: TrainState) -> dict[str, Any]:
    # One rank of a data-parallel group reads a shard and sends it to the others.
    groups = train_state.model.groups
    strategy = FullyParallelLoadStrategyWrapper(_AgreeingLoadStrategy(groups), groups.data)
    state = _sharded_state(train_state, is_loading=True)
    # Restricts what objects among the shards may name.
    with environment_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1"):
        with _read_together(directory, groups):
            # ``load`` reads it again, but outside the strategy: ranks must agree on failures here.
            dist_checkpointing.load_common_state_dict(str(directory))
        return dist_checkpointing.load(state, str(directory), strategy)


@contextmanager
def _read_together(directory: Path, groups: ProcessGroups) -> Iterator[None]:
    """Turn an error of the libraries into a ``CheckpointError`` on every rank.

    The block reads files; it has no collective.
    """
    with fail_together(groups, files.CheckpointError):
        try:
            yield
        except (Exception, CheckpointException) as error:  # torch's is a BaseException
            first: BaseException = error
            if isinstance(error, CheckpointException) and error.failures:
                first, _ = next(iter(error.failures.values()))
            if not isinstance(first, Exception) or isinstance(first, torch.OutOfMemoryError):
                raise first from error  # not the checkpoint's fault, such as an interrupt
            raise files.CheckpointError(
                f"{directory}: cannot be loaded into this model ({files.reason_of(first)}); resume "
                "with the model that saved it; if a file is damaged, "
                f"{files.other_checkpoint(directory)}"
            ) from error


def _sharded_state(train_state: TrainState, *, is_loading: bool) -> dict[str, Any]:
    metadata = dict(METADATA)  # Megatron writes process groups into it
    state = {
        f"model{number}": trained.sharded_state_dict(metadata=metadata)
        for number, trained in enumerate(_trained_modules(train_state))
    }
    optimizer = sharded_state(
        train_state.optimizer,
        state,
        train_state.num_updates,
        is_loading=is_loading,
        metadata=metadata,
    )
    return {**state, "optimizer": optimizer}


def _trained_modules(train_state: TrainState) -> list[Any]:
    """Return the chunks, or their adapters, if these alone are trained."""
    model = train_state.model
    return [chunk if model.lora is None else chunk.lora for chunk in model.chunks]


def _check_adapters(directory: Path, saved: dict[str, Any] | None, model: Model) -> None:
    """Refuse adapters of other settings or of another base."""
    lora = model.lora
    current = None if lora is None else lora.identity
    if (saved is None) != (current is None):
        kind = "all weights" if saved is None else f"adapters of rank {saved['rank']}"
        raise files.CheckpointError(
            f"{directory}: holds {kind}, but model.lora.rank is {lora.config.rank if lora else 0}; "
            f"resume with model.lora.rank={0 if saved is None else saved['rank']}"
        )
    if saved is None or current is None:
        return
    for name, shown, key in (
        *((name, name, f"model.lora.{name}") for name in ("rank", "alpha", "targets")),
        ("base", "base_path", "model.path"),
    ):
        if saved[name] != current[name]:
            raise files.CheckpointError(
                f"{directory}: saved with another {key}, {saved[shown]}, got {current[shown]}; "
                "resume with that one"
            )


def _rng_name(rank: int) -> str:
    return f"rng_{rank}.pt"


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


def rng_layout(groups: ProcessGroups) -> dict[str, int]:
    """Return the sizes that determine each rank's random streams; equal ones can restore them."""
    return {
        "tensor": groups.tensor.size(),
        "pipeline": groups.pipeline.size(),
        "virtual_pipeline": groups.virtual_size,
        "context": groups.context.size(),
        "world": groups.world_size,
    }
