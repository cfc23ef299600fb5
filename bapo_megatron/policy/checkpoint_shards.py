"""Writing this rank's shards of a checkpoint, at once or while training goes on.

Megatron plans who writes what (its torch_dist format); the writing is ours. Megatron's own forks
processes and passes their results through a manager process, which outlives a killed trainer. A
thread ends with it, shares its memory, and leaves the interpreter to others while it writes.
"""

from __future__ import annotations

import io
import os
import queue
import threading
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item

from bapo_megatron.files import atomic_write_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from torch import Tensor
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.checkpoint.storage import WriteResult

BACKEND = CheckpointingConfig(sharded_backend="torch_dist", sharded_backend_version=1)


class _AbandonedError(Exception):
    """The writer was told to stop."""


class ShardWriter:
    """Writes what was planned for this rank; made by ``plan_shards``.

    Attributes:
        file_names: The files of this rank.
        results: What was written where, when the writing has ended.
        error: Why it ended early, if it did.
    """

    def __init__(
        self, storage: FileSystemWriterAsync, metadata: Metadata | None, common: dict[str, Any]
    ) -> None:
        """Take the plan.

        Args:
            storage: Holds this rank's tensors.
            metadata: On rank 0: what the shards of all ranks are.
            common: What is equal on all ranks and no tensor.
        """
        self._storage = storage
        self._metadata = metadata
        self._common = common
        self._buckets: list[Any] = storage.write_buckets
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.file_names = [name for _, name, _ in self._buckets]
        self.results: list[WriteResult] = []
        self.error: Exception | None = None

    def write_common(self, directory: Path) -> None:
        """Write what all ranks have in common; on rank 0."""
        content = io.BytesIO()
        torch.save(self._common, content)
        atomic_write_bytes(directory / COMMON_STATE_FNAME, content.getvalue())

    def write(self) -> None:
        """Write the files; ``error`` tells whether it succeeded."""
        try:
            for path, name, (objects, tensors) in self._buckets:
                self.results += self._write_file(path, name, objects, self._on_host(tensors))
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for this writer
            self.error = error
        self._buckets = []

    def start(self) -> None:
        """Copy everything to host memory, then write the copies in a thread.

        When this returns, training may change what the checkpoint was planned from.
        """
        for _, _, (_, tensors) in self._buckets:
            for number, (item, tensor) in enumerate(tensors):
                # In place: what Megatron gathered for this save goes as its copy comes. What it
                # brought to the host of a GPU is a copy already; without a GPU the weights
                # themselves are there.
                tensors[number] = (item, tensor.to("cpu", copy=not torch.cuda.is_available()))
        # Nobody waits for a daemon at the interpreter's exit; ``abandon`` does, and briefly.
        self._thread = threading.Thread(target=self.write, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread still writes."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the writing has ended."""
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """Stop after the tensor that is being written."""
        self._stop.set()
        self.wait()

    def write_metadata(self, directory: Path, results: list[list[WriteResult]]) -> None:
        """Write what makes shards a checkpoint; on rank 0, when every rank has written its own.

        Args:
            directory: The checkpoint's directory.
            results: Those of all ranks.
        """
        self._storage.finish(self._metadata, results)
        save_config(BACKEND, str(directory))

    def _write_file(
        self,
        path: str,
        name: str,
        objects: Sequence[tuple[WriteItem, io.BytesIO]],
        tensors: Iterable[tuple[WriteItem, Tensor]],
    ) -> list[WriteResult]:
        results = []
        with open(path, "wb") as stream:  # noqa: PTH123 - Megatron's paths are strings
            for items in (objects, tensors):
                for item, data in items:
                    if self._stop.is_set():
                        raise _AbandonedError
                    results.append(
                        _write_item(
                            self._storage.transforms,
                            stream,
                            data,
                            item,
                            name,
                            SerializationFormat.TORCH_SAVE,
                        )
                    )
            stream.flush()
            os.fsync(stream.fileno())
        return results

    @staticmethod
    def _on_host(tensors: Iterable[tuple[WriteItem, Tensor]]) -> Iterator[tuple[WriteItem, Tensor]]:
        """Bring over one tensor at a time; none is copied that is there already."""
        for item, tensor in tensors:
            yield item, tensor.to("cpu")


def plan_shards(state: dict[str, Any], directory: Path) -> ShardWriter:
    """Decide who writes what; a collective over all ranks.

    These are the steps of ``dist_checkpointing.save`` up to the first file.

    Args:
        state: Megatron's sharded state dict.
        directory: An existing, empty directory.
    """
    sharded, common = save_preprocess(state)
    strategy = _PlanningStrategy(
        BACKEND.sharded_backend, BACKEND.sharded_backend_version, thread_count=1
    )
    # Planning asks for the queue through which Megatron's processes would return their results,
    # and starts the manager process if there is none.
    former, filesystem_async._results_queue = filesystem_async._results_queue, queue.SimpleQueue()
    try:
        storage, metadata = strategy.async_save(sharded, str(directory))
    finally:
        filesystem_async._results_queue = former
    return ShardWriter(storage, metadata, common)


class _PlanningStrategy(TorchDistSaveShardedStrategy):
    """Megatron's strategy up to the plan."""

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, planned: tuple[Any, Metadata | None, Any]
    ) -> tuple[FileSystemWriterAsync, Metadata | None]:
        return writer, planned[1]
