"""Writes this rank's checkpoint shards, at once or while training continues.

Megatron decides what is saved and which replica writes it; torch's planner and file writer do the
rest, in a thread, which ends with its process.
"""

import io
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from bapo_megatron.policy.checkpoint_reader import hash_pieces
from bapo_megatron.runtime.distributed import ProcessGroups, gather_objects

BACKEND = CheckpointingConfig(sharded_backend="torch_dist", sharded_backend_version=1)


def torch_bytes(value: Any) -> bytes:
    """Return what ``torch.save`` writes."""
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


class _Planner(MCoreSavePlanner):
    """Megatron's planner, which can be stopped."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.is_stopped = False

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self.check_running()
        return super().resolve_data(write_item)

    def check_running(self) -> None:
        """Raise ``InterruptedError`` once it is stopped."""
        if self.is_stopped:
            raise InterruptedError("the save was abandoned")


class ShardWriter:
    """Writes this rank's part of a checkpoint."""

    def __init__(
        self, state: dict[str, Any], directory: Path, groups: ProcessGroups, *, copies: bool
    ) -> None:
        """Plan which rank writes what into an existing, empty directory; a collective of all ranks.

        ``state`` is Megatron's sharded state dict. Ranks of ``groups.data``, which have the same
        weights, divide them among each other. With ``copies``, training may change what is saved as
        soon as this returns; otherwise once ``write`` has ended.
        """
        self._directory, self._groups, self._copies = directory, groups, copies
        # A thread's current device is GPU 0, and copies are in host memory: copy nothing ahead.
        copy_ahead_bytes = 0 if copies else 10_000_000
        self._storage = FileSystemWriter(directory, per_thread_copy_ahead=copy_ahead_bytes)
        self._planner = _Planner()
        self._metadata: Metadata | None = None
        self.thread = threading.Thread(target=self.write, name="checkpoint", daemon=True)
        """Runs ``write`` beside training once it is started."""
        self.pieces: dict[str, dict[str, str]] = defaultdict(dict)
        """Checksums of what was written, see ``checkpoint_files.Checksums``."""
        self.results: list[WriteResult] = []
        """What was written where, when the writing has ended."""
        self.error: Exception | None = None
        """Why it ended early, if it did."""
        strategy = FullyParallelSaveStrategyWrapper(self, groups.data)
        dist_checkpointing.save(state, str(directory), strategy, async_sharded_save=True)

    def async_save(self, sharded_state_dict: dict[str, Any], *_: Any) -> AsyncRequest:
        """Plan what this rank writes; called by ``dist_checkpointing.save``, as on a strategy."""
        shards: dict[str, list[ShardedBase]] = defaultdict(list)
        for shard in nested_values(sharded_state_dict):
            if not is_main_replica(shard.replica_id):
                continue
            if self._copies and isinstance(shard, ShardedTensor):
                # With a GPU, tensors in host memory were copied there for this save; without one
                # they may be the weights themselves.
                copy = self._groups.device.type == "cpu"
                shard.data = shard.data.detach().to("cpu", copy=copy)
            is_object = isinstance(shard, ShardedObject)
            shards[shard.unique_key if is_object else shard.key].append(shard)
        is_coordinator, rank = self._groups.rank == 0, self._groups.rank
        self._planner.set_up_planner(mcore_to_pyt_state_dict(shards), None, is_coordinator)
        self._storage.set_up_storage_writer(is_coordinator)
        # Not the storage's prepare_local_plan: it would make the directory on a node that does not
        # share it.
        plan = self._planner.create_local_plan()
        plans = gather_objects(plan, self._groups)
        if plans is not None:
            _, self._metadata = self._planner.create_global_plan(plans)
        # In Megatron's state dicts every shard has one writer, so the plan of all ranks changes
        # nothing but the name of each rank's file.
        plan = self._storage.prepare_global_plan([plan] * (rank + 1))[rank]
        self._planner.finish_plan(plan)
        return AsyncRequest(self.write, (), [])

    def write(self) -> None:
        """Write the files; ``error`` tells whether it succeeded."""
        planner = self._planner
        try:
            self.results = self._storage.write_data(planner.plan, planner).wait()
            places = [result.storage_data for result in self.results]
            for place, checksum in hash_pieces(self._directory, places):
                self.pieces[place.relative_path][str(place.offset)] = checksum
                planner.check_running()
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for this writer
            self.error = error
        planner.state_dict = {}  # all that was to be written

    def wait(self) -> None:
        """Wait until the thread has ended, if it was started."""
        if self.thread.ident is not None:
            self.thread.join()

    def abandon(self) -> None:
        """Stop after the tensor that is being written or hashed."""
        self._planner.is_stopped = True
        self.wait()

    def write_metadata(self, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint; on rank 0, with the results of all ranks."""
        assert self._metadata is not None, "only rank 0 has it"
        self._storage.finish(self._metadata, results)
        save_config(BACKEND, str(self._directory))
