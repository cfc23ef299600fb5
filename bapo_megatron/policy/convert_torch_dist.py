"""Megatron's torch_dist checkpoints, read and written one parameter at a time in one process.

The format describes whole tensors and the pieces of them that each file holds, so it does not know
the layout it came from: a parameter is what a single rank without any parallelism would hold. The
parameters of all layers with the same role are one tensor whose first axis counts the layers.
"""

import io
import math
import pickle
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from zipfile import BadZipFile

import torch
from megatron.core.dist_checkpointing.core import maybe_load_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint import planner as dcp_planner
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.storage import WriteResult

from bapo_megatron.policy import checkpoint_shards as shards
from bapo_megatron.policy import hf_weights
from bapo_megatron.policy.checkpoint_files import first_line
from bapo_megatron.policy.hf_config import HfConfig

METADATA_NAME = ".metadata"

OPTIMIZER_STATE = re.compile(r"(^|\.)optimizer\.")
"""Tensors of a checkpoint that are no parameters."""

MODULES_WITHOUT_STATE = {
    weight.megatron.removesuffix(".weight") for weight in (hf_weights.EMBEDDING, hf_weights.OUTPUT)
}
"""Modules whose 8-bit state Megatron does not save."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a checkpoint keeps one parameter."""

    key: str
    """Name of the stored tensor."""
    shape: tuple[int, ...]
    """Shape of the stored tensor."""
    layer: int | None
    """Its place on the first axis; None: the stored tensor is the parameter."""

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Shape of the parameter as a piece of the stored tensor."""
        return self.shape if self.layer is None else (1, *self.shape[1:])


def _stacked_slot(weight: hf_weights.Weight, hf: HfConfig) -> _Slot:
    """Return where a checkpoint with the layers on a first axis keeps ``weight``."""
    shape = hf_weights.shard_shape(weight, hf, size=1)
    if weight.layer is None:
        return _Slot(weight.megatron, shape, None)
    key = weight.megatron.replace(f".{weight.layer}.", ".", 1)
    return _Slot(key, (hf.num_layers, *shape), weight.layer)


class TorchDistReader:
    """The parameters of a checkpoint of any layout, checked before the first is read.

    Attributes:
        dtypes: The dtype of each stored parameter by its key.
    """

    def __init__(self, directory: Path, hf: HfConfig) -> None:
        """Read the checkpoint's description.

        Raises:
            ValueError: The checkpoint is of another format, damaged, or of another model; one line
                that names files or keys.
        """
        self.directory = directory
        self._metadata = _read_metadata(directory)
        self._stored = {
            key: stored
            for key, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, dcp_metadata.TensorStorageMetadata)
            and not OPTIMIZER_STATE.search(key)
        }
        self._slots = {w.megatron: self._slot(w, hf) for w in hf_weights.weight_table(hf)}
        keys = dict.fromkeys(slot.key for slot in self._slots.values())
        hf_weights.refuse_differences(
            keys,
            self._stored,
            f"{directory}: parameters do not fit config.json",
            "give the Hugging Face directory of the model that was trained (--hf)",
        )
        self._check_shapes(hf)
        self._check_files()
        self._reader = FileSystemReader(directory)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self.dtypes = {key: self._stored[key].properties.dtype for key in keys}

    def read(self, weight: hf_weights.Weight) -> Tensor:
        """Return a parameter as one rank without parallelism would hold it.

        Raises:
            ValueError: Its bytes are damaged.
        """
        slot = self._slots[weight.megatron]
        # The vocabulary may be padded by another rule than ours.
        stored = self._stored[slot.key]
        piece = torch.empty(
            stored.size if slot.layer is None else slot.piece_shape, dtype=stored.properties.dtype
        )
        division = () if slot.layer is None else ((0, slot.layer, slot.shape[0]),)
        target = ShardedTensor.from_rank_offsets(slot.key, piece, *division)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(
            {slot.key: CheckpointableShardedTensor.from_sh_ten(target)}, self._metadata
        )
        try:
            with _first_error(str(self.directory)):
                self._reader.read_data(planner.create_local_plan(), planner).wait()
        except (RuntimeError, EOFError, pickle.UnpicklingError, BadZipFile) as error:
            raise ValueError(
                f"{self.directory}: {slot.key} is damaged ({first_line(error)}); restore the "
                "files or use another checkpoint"
            ) from error
        return piece if slot.layer is None else piece[0]

    def _slot(self, weight: hf_weights.Weight, hf: HfConfig) -> _Slot:
        if weight.layer is not None and weight.megatron in self._stored:
            # Other tools may store the layers one by one.
            return _Slot(weight.megatron, hf_weights.shard_shape(weight, hf, size=1), None)
        return _stacked_slot(weight, hf)

    def _check_shapes(self, hf: HfConfig) -> None:
        shapes = []
        for weight in hf_weights.weight_table(hf):
            slot = self._slots[weight.megatron]
            found, expected = tuple(self._stored[slot.key].size), slot.shape
            is_padded = weight.form == "vocab" and found[0] >= hf.vocab_size
            if not (is_padded and found[1:] == expected[1:]):
                shapes.append((slot.key, found, expected))
        hf_weights.refuse_shapes(shapes, self.directory)

    def _check_files(self) -> None:
        """Refuse missing pieces and short files: reading would leave parameters half filled."""
        for key, stored in sorted(self._stored.items()):
            if sum(math.prod(chunk.sizes) for chunk in stored.chunks) != math.prod(stored.size):
                raise ValueError(
                    f"{self.directory}: damaged, parts of {key} are missing; use another checkpoint"
                )
        ends: dict[str, int] = {}
        for index, place in self._metadata.storage_data.items():
            if index.fqn in self._stored:
                end = place.offset + place.length
                ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
        for name, num_bytes in sorted(ends.items()):
            path = self.directory / name
            if not path.is_file() or path.stat().st_size < num_bytes:
                actual = f"has {path.stat().st_size} bytes" if path.is_file() else "is missing"
                raise ValueError(
                    f"{self.directory}: damaged, {name} {actual}, at least {num_bytes} bytes are "
                    "needed; restore the files or use another checkpoint"
                )


class TorchDistWriter:
    """Writes a checkpoint of parameters alone: ``write`` each one, then ``finish``.

    At most one parameter is in memory.

    Attributes:
        num_files: Files of weights begun so far.
    """

    def __init__(self, directory: Path, hf: HfConfig, max_file_bytes: int) -> None:
        """Begin a checkpoint in an existing, empty directory."""
        self._directory = directory
        self._storage = FileSystemWriter(directory, sync_files=False)  # publishing it flushes it
        self._hf = hf
        self._max_file_bytes = max_file_bytes
        self._items: list[dcp_planner.WriteItem] = []
        self._results: list[WriteResult] = []
        self._stream: io.BufferedWriter | None = None
        self.num_files = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            with suppress(OSError):  # it was closed by finish, or another error is on its way
                self._stream.close()

    def write(self, weight: hf_weights.Weight, parameter: Tensor) -> None:
        """Append a parameter, as one rank without parallelism would hold it."""
        slot = _stacked_slot(weight, self._hf)
        assert parameter.numel() == math.prod(slot.piece_shape), (weight.megatron, parameter.shape)
        offsets = torch.Size([slot.layer or 0] + [0] * (len(slot.shape) - 1))
        chunk = dcp_metadata.ChunkStorageMetadata(offsets, torch.Size(slot.piece_shape))
        item = dcp_planner.WriteItem(
            dcp_metadata.MetadataIndex(slot.key, offsets),
            dcp_planner.WriteItemType.SHARD,
            tensor_data=dcp_planner.TensorWriteData(
                chunk, dcp_metadata.TensorProperties(dtype=parameter.dtype), torch.Size(slot.shape)
            ),
        )
        # Storage is written whole, also what lies outside a view.
        piece = parameter.reshape(slot.piece_shape)
        if piece.untyped_storage().nbytes() != piece.nbytes or not piece.is_contiguous():
            piece = piece.clone(memory_format=torch.contiguous_format)
        self._append(item, piece, piece.nbytes)

    def finish(self) -> None:
        """Write what makes the files a checkpoint."""
        for key in _empty_states(self._hf):
            state = io.BytesIO()
            torch.save([None], state)  # a list: one entry per rank that shares the object
            item = dcp_planner.WriteItem(
                dcp_metadata.MetadataIndex(key), dcp_planner.WriteItemType.BYTE_IO
            )
            self._append(item, state, len(state.getvalue()))
        assert self._stream is not None
        self._stream.close()
        # Megatron's trainer reads from the version in which order the rows of linear_qkv are, and
        # takes its absence for the oldest.
        shards.write_common({"checkpoint_version": 3.0, "iteration": 0}, self._directory)
        _, metadata = create_default_global_save_plan([dcp_planner.SavePlan(self._items)])
        shards.write_metadata(self._storage, metadata, [self._results], self._directory)

    def _append(
        self, item: dcp_planner.WriteItem, data: Tensor | io.BytesIO, num_bytes: int
    ) -> None:
        stream = self._stream
        if stream is None or 0 < stream.tell() > self._max_file_bytes - num_bytes:
            if stream is not None:
                stream.close()
            stream = self._stream = (self._directory / _file_name(self.num_files)).open("xb")
            self.num_files += 1
        with _first_error(stream.name):
            name = _file_name(self.num_files - 1)
            self._results.append(shards.write_shard(self._storage, stream, data, item, name))
        self._items.append(item)


@contextmanager
def _first_error(place: str) -> Iterator[None]:
    """Raise what made torch's reader or writer fail, where it hides that behind its own error."""
    try:
        yield
    except (RuntimeError, SystemError) as error:
        first = error.__context__
        if isinstance(first, OSError):
            first.filename = place
        if isinstance(first, OSError | KeyboardInterrupt | SystemExit):
            raise first from None
        raise


def _file_name(number: int) -> str:
    """Megatron's names: the rank that wrote the file, and its number."""
    return f"__0_{number}.distcp"


def _empty_states(hf: HfConfig) -> Iterable[str]:
    """Return the keys of the 8-bit states that models ask for, whether they use them or not.

    A model with Transformer Engine has them in every module below, one of Megatron's own layers in
    the linear ones, and a missing one is an error when loading.
    """
    states: dict[str, None] = {}
    for weight in hf_weights.weight_table(hf):
        modules = [weight.megatron.rpartition(".")[0]]
        if weight.layer is not None:
            modules.append(f"decoder.layers.{weight.layer}.self_attention.core_attention")
        for module in modules:
            if module in MODULES_WITHOUT_STATE:
                continue
            shape, offset = (1,), (0,)
            if weight.layer is not None:
                module = module.replace(f".{weight.layer}.", ".", 1)
                shape, offset = (hf.num_layers,), (weight.layer,)
            states[ShardedObject(f"{module}._extra_state", None, shape, offset).unique_key] = None
    return states


def _read_metadata(directory: Path) -> dcp_metadata.Metadata:
    backend = shards.BACKEND.sharded_backend
    try:
        config = maybe_load_config(str(directory))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{directory / 'metadata.json'}: damaged ({first_line(error)}); restore the file"
        ) from error
    if config is None or config.sharded_backend != backend:
        found = "metadata.json is missing" if config is None else config.sharded_backend
        raise ValueError(
            f"{directory}: not a {backend} checkpoint ({found}); save it with --ckpt-format "
            f"{backend}, or restore the file"
        )
    try:
        return FileSystemReader(directory).read_metadata()
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{directory / METADATA_NAME}: damaged ({first_line(error)}); use another checkpoint"
        ) from error
