"""Writing this rank's shards of a checkpoint, at once or while training goes on.

Megatron plans who writes what (its torch_dist format); the writing is ours. Megatron's own forks
processes and passes their results through a manager process, which outlives a killed trainer. A
thread ends with it, shares its memory, and leaves the interpreter to others while it writes.
"""

import io
import os
import queue
import threading
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import Tensor
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import Buffer

from bapo_megatron.files import atomic_write_bytes, naming
from bapo_megatron.policy.checkpoint_files import new_checksum

BACKEND = CheckpointingConfig(sharded_backend="torch_dist", sharded_backend_version=1)
TORCH_SAVE = SerializationFormat.TORCH_SAVE


def torch_bytes(value: Any) -> io.BytesIO:
    """Return what ``torch.save`` writes."""
    content = io.BytesIO()
    torch.save(value, content)
    return content


def write_common(common: dict[str, Any], directory: Path) -> None:
    """Write what is equal on all ranks and is not a tensor."""
    atomic_write_bytes(directory / COMMON_STATE_FNAME, torch_bytes(common).getvalue())


class HashedFile(io.IOBase):
    """A file that is written piece by piece.

    Attributes:
        pieces: Checksum of each piece by its first byte, see ``checkpoint_files.Checksums``.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._hash, self._start = stream, new_checksum(), stream.tell()
        self.pieces: dict[str, str] = {}

    def write(self, content: Buffer) -> int:
        """Append to the piece."""
        self._hash.update(content)
        return self._stream.write(content)

    def tell(self) -> int:
        """Return the file's position."""
        return self._stream.tell()

    def end_piece(self) -> None:
        """Note the checksum of what was written since the piece before."""
        self.pieces[str(self._start)] = self._hash.hexdigest()
        self._hash, self._start = new_checksum(), self.tell()


class _PlanningStrategy(TorchDistSaveShardedStrategy):
    """Megatron's strategy up to the plan."""

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any) -> tuple[Any, Any]:
        return writer, planned[1]


class ShardWriter:
    """Writes this rank's part of a checkpoint.

    Attributes:
        common: What ``write_common`` writes on rank 0.
        file_names: The files of this rank.
        pieces: Checksums of what was written, see ``checkpoint_files.Checksums``.
        results: What was written where, when the writing has ended.
        error: Why it ended early, if it did.
    """

    def __init__(self, state: dict[str, Any], directory: Path, replicas: dist.ProcessGroup) -> None:
        """Decide who writes what into an existing, empty directory; a collective over all ranks.

        These are the steps of ``dist_checkpointing.save`` up to the first file; ``state`` is
        Megatron's sharded state dict. Ranks of ``replicas``, which have the same weights, divide
        them among each other.
        """
        sharded, self.common = save_preprocess(state)
        planning = _PlanningStrategy(
            BACKEND.sharded_backend, BACKEND.sharded_backend_version, thread_count=1
        )
        strategy = FullyParallelSaveStrategyWrapper(planning, replicas)
        # Planning asks for the queue through which Megatron's processes would return their results,
        # and starts the manager process if there is none.
        former = filesystem_async._results_queue
        filesystem_async._results_queue = queue.SimpleQueue()
        try:
            # On rank 0 the metadata describe the shards of all ranks.
            self._storage, self._metadata = strategy.async_save(sharded, str(directory))
        finally:
            filesystem_async._results_queue = former
        self._directory = directory
        self._buckets: list[Any] = self._storage.write_buckets
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.file_names = [name for _, name, _ in self._buckets]
        self.pieces: dict[str, dict[str, str]] = {}
        self.results: list[WriteResult] = []
        self.error: Exception | None = None

    def write(self) -> None:
        """Write the files; ``error`` tells whether it succeeded."""
        transforms = self._storage.transforms
        try:
            for path, name, (objects, tensors) in self._buckets:
                with naming(Path(path)), Path(path).open("wb") as stream:
                    hashed = HashedFile(stream)
                    self.pieces[name] = hashed.pieces
                    for item, data in chain(objects, tensors):
                        if self._stop.is_set():
                            raise InterruptedError("the save was abandoned")
                        if isinstance(data, Tensor):
                            data = data.to("cpu")  # one at a time; no copy of one that is there
                        self.results.append(
                            _write_item(transforms, hashed, data, item, name, TORCH_SAVE)
                        )
                        hashed.end_piece()
                    stream.flush()
                    os.fsync(stream.fileno())
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for this writer
            self.error = error
        self._buckets = []

    def start(self) -> None:
        """Copy everything to host memory, then write the copies in a thread.

        When this returns, training may change what the checkpoint was planned from.
        """
        for _, _, (_, tensors) in self._buckets:
            for number, (item, tensor) in enumerate(tensors):
                # In place: what Megatron gathered for this save is freed tensor by tensor. What it
                # brought to host memory from a GPU is a copy already; without a GPU these are the
                # weights themselves.
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

    def write_metadata(self, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint; on rank 0, with the results of all ranks."""
        self._storage.finish(self._metadata, results)
        save_config(BACKEND, str(self._directory))
